"""Backends whose events have several `data:` lines, as the format allows: what callers read is the same."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.llm_proxy.rogue_backend import RESPONSES, STREAM_END, Peer
from tests.support.llm_proxy.rogue_world import STREAMED, RogueWorld, request_of, rogue_fixtures

pytestmark = pytest.mark.asyncio(loop_scope="module")
shared, world = rogue_fixtures()

VOLATILE = ("created", "created_at")


def spread(event: bytes, line_end: bytes) -> bytes:
    """Returns an event with its document over as many lines as it has members."""
    lines = []
    for line in event.rstrip(b"\n").split(b"\n"):
        name, _, data = line.partition(b": ")
        if name == b"data" and data.startswith(b"{"):
            pretty = json.dumps(json.loads(data), indent=2).encode().split(b"\n")
            lines += [b"data: " + piece for piece in pretty]
        else:
            lines.append(line)
    return line_end.join(lines) + 2 * line_end


def documents(body: bytes) -> list[Any]:
    """Returns the documents of a stream as the standard reads them; a line that is no field is ignored."""
    found = []
    for event in re.split(rb"\r?\n\r?\n", body):
        lines = [
            line.removeprefix(b"data:").removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")
        ]
        data = b"\n".join(lines)
        if data.startswith(b"{"):
            found.append(without(json.loads(data)))
    return found


def without(value: Any) -> Any:
    """Returns a document without times."""
    if isinstance(value, dict):
        return {name: without(each) for name, each in value.items() if name not in VOLATILE}
    return [without(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize(("path", "model"), STREAMED)
async def test_a_stream_of_events_of_several_lines_reads_as_that_of_single_ones(
    world: RogueWorld, path: str, model: str, line_end: bytes
) -> None:
    async def spreads(peer: Peer) -> bool:
        await peer.stream(*(spread(event, line_end) for event in peer.events))
        await peer.send(STREAM_END)
        return True

    # A response that is stored has an id of its own.
    body = request_of(path, model) | {"stream": True} | ({"store": False} if path == RESPONSES else {})
    plain = await world.post(path, body, world.key())
    world.backend.act = spreads
    answer = await world.post(path, body, world.key())
    assert answer.status == 200
    assert documents(answer.body) == documents(plain.body) != []
