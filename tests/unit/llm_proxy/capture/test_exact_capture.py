"""Whatever a backend streams, however it is cut: the capture is what was sampled, the agent's bytes are untouched."""

from __future__ import annotations

import itertools
import json
from array import array
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen_llm_proxy.apis.chat import ChatApi
from fulmen_llm_proxy.apis.collected import Asked, Collected
from fulmen_llm_proxy.apis.sse import EventSplitter
from fulmen_llm_proxy.capture.decode import Captured, Flaw, decode_capture

API = ChatApi()
LIMIT_BYTES = 1 << 20
PROMPT_IDS = [5, 6, 7]
VERSION = 4

JSON = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What one chunk brings to one choice; a chunk may bring text without tokens, and tokens without text."""

    ids: list[int]
    logprobs: list[float]
    text: str
    tool: int | None
    """Index of the tool call whose arguments the text belongs to; None: content."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """An answer: the pieces of each choice, and the order in which the choices speak."""

    choices: list[list[Piece]]
    finish: list[str]
    turns: list[int]
    usage_in_all: bool = False
    asked: Asked = field(default_factory=Asked)

    def ids(self, index: int) -> list[int]:
        return [token for piece in self.choices[index] for token in piece.ids]

    def logprobs(self, index: int) -> list[float]:
        return [value for piece in self.choices[index] for value in piece.logprobs]


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    count = draw(st.integers(0, 3))
    return Piece(
        ids=draw(st.lists(st.integers(0, 200_000), min_size=count, max_size=count)),
        logprobs=draw(st.lists(st.floats(-50, 0, width=32), min_size=count, max_size=count)),
        text=draw(st.text(max_size=4)),
        tool=draw(st.none() | st.integers(0, 2)),
    )


@st.composite
def answers(draw: st.DrawFn) -> Sampled:
    count = draw(st.integers(1, 3))
    first = Piece(ids=[1], logprobs=[-0.5], text="x", tool=None)
    choices = [[first, *draw(st.lists(pieces(), max_size=5))] for _ in range(count)]
    turns = [index for index, own in enumerate(choices) for _ in own]
    return Sampled(
        choices=choices,
        finish=draw(st.lists(st.sampled_from(["stop", "length", "tool_calls"]), min_size=count, max_size=count)),
        turns=draw(st.permutations(turns)),
        usage_in_all=draw(st.booleans()),
        asked=Asked(token_ids=draw(st.booleans()), logprobs=draw(st.booleans()), stream_usage=draw(st.booleans())),
    )


def encoded(document: JSON) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def entries(piece: Piece) -> JSON:
    return {"content": [{"token": "t", "logprob": value, "bytes": None} for value in piece.logprobs]}


def delta_of(piece: Piece) -> JSON:
    if piece.tool is None:
        return {"content": piece.text}
    call = {"index": piece.tool, "id": f"call_{piece.tool}", "type": "function", "function": {"arguments": piece.text}}
    return {"tool_calls": [call]}


def streamed(sampled: Sampled, *, capture: bool) -> bytes:
    """What a backend sends when the capture asks too, or when the agent alone asks."""
    ids, logprobs = capture or sampled.asked.token_ids, capture or sampled.asked.logprobs
    usage = capture or sampled.asked.stream_usage
    documents: list[JSON] = []
    for index in range(len(sampled.choices)):
        choice = {"index": index, "delta": {"role": "assistant"}, "logprobs": None, "finish_reason": None}
        documents.append({"id": "c", "choices": [choice]})
    if ids:
        documents[0] = {"id": "c", "prompt_token_ids": PROMPT_IDS, "choices": documents[0]["choices"]}
    left = [iter(own) for own in sampled.choices]
    for index in sampled.turns:
        piece = next(left[index])
        choice = {"index": index, "delta": delta_of(piece), "logprobs": None, "unknown": 2.50, "finish_reason": None}
        if logprobs and piece.logprobs:
            choice["logprobs"] = entries(piece)
        if ids and piece.ids:
            choice["token_ids"] = piece.ids
        documents.append({"id": "c", "choices": [choice]})
    for index, reason in enumerate(sampled.finish):
        documents.append({"id": "c", "choices": [{"index": index, "delta": {}, "finish_reason": reason}]})
    # A chunk that is no answer and has no choices, as Azure sends.
    documents.append({"id": "", "prompt_filter_results": [{"prompt_index": 0}], "choices": []})
    if usage:
        if sampled.usage_in_all:
            for document in documents:
                document["usage"] = None
        documents.append({"id": "c", "choices": [], "usage": usage_of(sampled)})
    return b"".join(b"data: %s\n\n" % encoded(document) for document in documents) + b"data: [DONE]\n\n"


def usage_of(sampled: Sampled) -> JSON:
    completion = sum(len(sampled.ids(index)) for index in range(len(sampled.choices)))
    return {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": completion}


def whole(sampled: Sampled, *, capture: bool) -> bytes:
    choices: list[JSON] = []
    for index, own in enumerate(sampled.choices):
        choice: JSON = {"index": index, "message": {"role": "assistant", "content": "x"}, "logprobs": None}
        if capture or sampled.asked.logprobs:
            choice["logprobs"] = {"content": [entry for piece in own for entry in entries(piece)["content"]]}
        choice["finish_reason"] = sampled.finish[index]
        if capture or sampled.asked.token_ids:
            choice["token_ids"] = sampled.ids(index)
        choices.append(choice)
    document: JSON = {"id": "c", "unknown": {"kept": [1, 2.50]}, "choices": choices, "usage": usage_of(sampled)}
    if capture or sampled.asked.token_ids:
        document["prompt_token_ids"] = PROMPT_IDS
    return encoded(document)


def read(data: bytes, cuts: list[int], asked: Asked) -> tuple[bytes, Collected]:
    splitter, reader = EventSplitter(LIMIT_BYTES), API.reader(asked)
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    passed = b""
    for start, end in itertools.pairwise(bounds):
        passed += b"".join([reader.event(event) for event in splitter.feed(data[start:end])])
    return passed + reader.end(), reader.collected


def captured_ids(captured: Captured) -> dict[int, list[int]]:
    return {choice.index: array("i", choice.token_ids).tolist() for choice in captured.choices}


def captured_logprobs(captured: Captured) -> dict[int, list[float]]:
    return {choice.index: array("f", choice.logprobs).tolist() for choice in captured.choices}


@given(sampled=answers(), cuts=st.lists(st.integers(0, 1 << 16), max_size=30))
@settings(deadline=None)
def test_a_stream_is_captured_to_the_token_and_the_agents_bytes_are_those_of_a_call_without_capture(
    sampled: Sampled, cuts: list[int]
) -> None:
    passed, collected = read(streamed(sampled, capture=True), cuts, sampled.asked)
    captured = decode_capture(collected, default_version=VERSION)
    indices = range(len(sampled.choices))
    assert passed == streamed(sampled, capture=False)
    assert captured.flaws == ()
    assert captured_ids(captured) == {index: sampled.ids(index) for index in indices}
    assert captured_logprobs(captured) == {index: sampled.logprobs(index) for index in indices}
    assert array("i", captured.prompt_ids).tolist() == PROMPT_IDS
    assert [choice.finish_reason for choice in captured.choices] == sampled.finish
    assembled = json.loads(API.assemble(collected.payloads))["choices"]
    for index, own in enumerate(sampled.choices):
        message = assembled[index]["message"]
        assert (message.get("content") or "") == "".join(piece.text for piece in own if piece.tool is None)
        called = {call["index"]: call["function"]["arguments"] for call in message.get("tool_calls", ())}
        tools = {piece.tool for piece in own if piece.tool is not None}
        assert called == {tool: "".join(piece.text for piece in own if piece.tool == tool) for tool in tools}


@given(sampled=answers())
@settings(deadline=None)
def test_a_whole_answer_is_captured_to_the_token_and_the_agents_bytes_are_those_of_a_call_without_capture(
    sampled: Sampled,
) -> None:
    reader = API.reader(sampled.asked)
    assert reader.whole(whole(sampled, capture=True)) == whole(sampled, capture=False)
    captured = decode_capture(reader.collected, default_version=VERSION)
    assert captured.flaws == ()
    assert captured_ids(captured) == {index: sampled.ids(index) for index in range(len(sampled.choices))}
    assert captured_logprobs(captured) == {index: sampled.logprobs(index) for index in range(len(sampled.choices))}


@given(sampled=answers(), keep=st.integers(0, 1 << 16))
@settings(deadline=None)
def test_a_stream_that_breaks_off_keeps_the_ids_that_came_and_is_not_trained_on(sampled: Sampled, keep: int) -> None:
    data = streamed(sampled, capture=True)
    last = len(b"data: [DONE]\n\n")
    data = data[: keep % (len(data) - last + 1)]
    _, collected = read(data, [], sampled.asked)
    captured = decode_capture(collected, default_version=VERSION)
    assert Flaw.INCOMPLETE in captured.flaws
    events = data.split(b"\n\n")[:-1]
    came: dict[int, list[int]] = {}
    for event in events:
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
            came.setdefault(choice["index"], []).extend(choice.get("token_ids", ()))
    assert captured_ids(captured) == came
