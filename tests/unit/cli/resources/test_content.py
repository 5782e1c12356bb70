"""Contents that are messages of the contract, as people write them."""

from __future__ import annotations

import pytest

from fulmen.runner.v1 import agent_spec_pb2 as pb
from fulmen_cli.resources.content import ContentInvalid, packed_content

SPEC = pb.AgentSpec(bundle="resources/bundle.x/versions/1", python=pb.PythonEntry(target="agent.py:solve"))
JSON = b'{"bundle": "resources/bundle.x/versions/1", "python": {"target": "agent.py:solve"}}'


@pytest.mark.parametrize("given", [JSON, str(SPEC).encode(), SPEC.SerializeToString()])
def test_an_agent_is_published_from_json_text_or_as_it_is_stored(given: bytes) -> None:
    content, media_type = packed_content("agent", given)
    assert pb.AgentSpec.FromString(content) == SPEC
    assert media_type == "application/x-protobuf; messageType=fulmen.runner.v1.AgentSpec"


@pytest.mark.parametrize("given", [b'{"pyton": {}}', b"python { goal: 1 }", b"{", b"\x12\xff"])
def test_what_is_no_agent_is_refused_before_it_is_published(given: bytes) -> None:
    with pytest.raises(ContentInvalid, match="This is not a fulmen"):
        packed_content("agent", given)


def test_other_kinds_are_published_as_they_are() -> None:
    assert packed_content("prompt", JSON) == (JSON, "")
