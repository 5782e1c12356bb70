"""Documents with the usual fields only are read another way than others, to the same effect."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fulmen_llm_proxy.apis.chat_reader import ChatReader
from fulmen_llm_proxy.apis.collected import Asked

JSON = dict[str, Any]

LOGPROBS = {"content": [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]}
CHOICE = st.fixed_dictionaries(
    {"index": st.integers(0, 2)},
    optional={
        "delta": st.fixed_dictionaries({"content": st.text(max_size=3)}),
        "logprobs": st.sampled_from([None, LOGPROBS]),
        "finish_reason": st.sampled_from([None, "stop"]),
        "stop_reason": st.sampled_from([None, 7]),
        "token_ids": st.sampled_from([None, [1], [1, 2]]),
    },
)
DOCUMENT = st.fixed_dictionaries(
    {"id": st.just("c-1"), "object": st.just("o"), "created": st.just(1), "model": st.just("m")},
    optional={
        "choices": st.lists(CHOICE, max_size=3),
        "usage": st.sampled_from([None, {"prompt_tokens": 3, "completion_tokens": 2}]),
        "prompt_token_ids": st.sampled_from([None, [5, 6]]),
        "system_fingerprint": st.sampled_from([None, "f"]),
    },
)
ASKED = st.builds(Asked, token_ids=st.booleans(), logprobs=st.booleans(), stream_usage=st.booleans())
UNUSUAL = {"told_by_this_engine_alone": {"a": [1, None]}}


def seen(reader: ChatReader, document: JSON, *, streamed: bool) -> tuple[JSON | None, JSON]:
    """Returns what the agent sees of a document, and what is kept of it, without the unusual field."""
    data = msgspec.json.encode(document)
    passed = reader.event(b"data: " + data + b"\n\n") if streamed else reader.whole(data)
    told = msgspec.json.decode(passed.removeprefix(b"data: ")) if passed else None
    kept = msgspec.to_builtins(reader.collected, builtin_types=(msgspec.Raw,))
    kept["payloads"] = [msgspec.json.decode(payload) for payload in reader.collected.payloads]
    for each in (told, *kept["payloads"]):
        if each is not None:
            each.pop("told_by_this_engine_alone", None)
    return told, msgspec.json.decode(msgspec.json.encode(kept))


@given(document=DOCUMENT, asked=ASKED, streamed=st.booleans())
def test_an_unusual_field_changes_nothing_else(document: JSON, asked: Asked, streamed: bool) -> None:
    usual = seen(ChatReader(asked), document, streamed=streamed)
    assert usual == seen(ChatReader(asked), document | UNUSUAL, streamed=streamed)


@given(document=DOCUMENT, asked=ASKED)
def test_an_unusual_field_passes_byte_for_byte(document: JSON, asked: Asked) -> None:
    odd = b'"told_by_this_engine_alone": {"a" : [1, 2.50] }'
    data = msgspec.json.encode(document)[:-1] + b"," + odd + b"}"
    assert b'{"a" : [1, 2.50] }' in ChatReader(asked).whole(data)
