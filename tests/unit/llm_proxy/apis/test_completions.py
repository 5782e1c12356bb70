"""Completions and embeddings: what is asked, what is hidden, what is captured."""

from __future__ import annotations

import itertools
import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from fulmen.errors import ArgumentInvalid
from fulmen_llm_proxy.apis.collected import Asked
from fulmen_llm_proxy.apis.completions import CompletionsApi, CompletionsReader
from fulmen_llm_proxy.apis.passthrough import EmbeddingsApi
from fulmen_llm_proxy.apis.sse import EventSplitter
from fulmen_llm_proxy.capture.decode import Captured, Flaw, decode_capture

COMPLETIONS = CompletionsApi()
REQUEST = {"model": "tiny", "prompt": ["one", "two"], "vendor": {"deep": [1]}}


def sent(request: dict, *, capture: bool = True) -> dict:
    parsed = COMPLETIONS.parse(json.dumps(request).encode())
    return json.loads(COMPLETIONS.body(parsed.fields, stream=parsed.stream, capture=capture))


def logprobs_of(values: list[float]) -> dict:
    return {
        "tokens": ["t"] * len(values),
        "token_logprobs": values,
        "text_offset": [0] * len(values),
        "top_logprobs": None,
    }


def choice(index: int, ids: list[int], *, prompt: list[int]) -> dict:
    return {
        "index": index,
        "text": "x" * len(ids),
        "logprobs": logprobs_of([-float(token) for token in ids]),
        "finish_reason": "stop",
        "token_ids": ids,
        "prompt_token_ids": prompt,
        "vendor_field": {"kept": True},
    }


def answer(choices: list[dict]) -> dict:
    total = sum(len(c["token_ids"]) for c in choices)
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1,
        "model": "served",
        "choices": choices,
        "usage": {"prompt_tokens": 4, "completion_tokens": total, "total_tokens": total + 4},
    }


def captured_of(reader: CompletionsReader) -> Captured:
    return decode_capture(reader.collected, default_version=2)


def pairs(captured: Captured) -> list[tuple[list[int], list[int], list[float]]]:
    return [
        (array("i", c.prompt_ids).tolist(), array("i", c.token_ids).tolist(), array("f", c.logprobs).tolist())
        for c in captured.choices
    ]


def test_the_capture_asks_for_ids_and_the_logprobs_of_what_was_sampled() -> None:
    assert sent(REQUEST) == REQUEST | {"return_token_ids": True, "logprobs": 0}
    assert sent(REQUEST | {"logprobs": None})["logprobs"] == 0
    assert sent(REQUEST | {"logprobs": 5})["logprobs"] == 5
    assert sent(REQUEST | {"stream": True}, capture=False)["stream_options"] == {"include_usage": True}
    assert sent(REQUEST, capture=False) == REQUEST


def test_an_echoed_prompt_cannot_be_captured_and_passes_without_capture() -> None:
    with pytest.raises(ArgumentInvalid, match="echo"):
        sent(REQUEST | {"echo": True})
    assert sent(REQUEST | {"echo": False})["echo"] is False
    assert sent(REQUEST | {"echo": True}, capture=False)["echo"] is True


def test_each_choice_keeps_its_own_prompt_and_the_agent_sees_what_it_asked_for() -> None:
    reader = COMPLETIONS.reader(Asked())
    document = answer([choice(0, [5, 6], prompt=[1, 2]), choice(1, [7], prompt=[3, 4])])
    passed = json.loads(reader.whole(json.dumps(document).encode()))
    assert pairs(captured_of(reader)) == [([1, 2], [5, 6], [-5, -6]), ([3, 4], [7], [-7])]
    assert captured_of(reader).flaws == ()
    for shown in passed["choices"]:
        assert shown.keys() == {"index", "text", "logprobs", "finish_reason", "vendor_field"}
        assert shown["logprobs"] is None
    assert Completion.model_validate(passed).choices[1].text == "x"

    everything = COMPLETIONS.reader(Asked(token_ids=True, logprobs=True))
    body = json.dumps(document).encode()
    assert everything.whole(body) == body


def test_a_choice_without_its_prompts_ids_is_not_trained_on() -> None:
    reader = COMPLETIONS.reader(Asked())
    first, second = choice(0, [5], prompt=[1]), choice(1, [7], prompt=[3])
    del second["prompt_token_ids"]
    reader.whole(json.dumps(answer([first, second])).encode())
    assert captured_of(reader).flaws == (Flaw.PROMPT_IDS_MISSING,)


def test_a_logprob_that_is_no_number_makes_the_answer_malformed() -> None:
    reader = COMPLETIONS.reader(Asked())
    broken = choice(0, [5], prompt=[1]) | {"logprobs": {"token_logprobs": [None]}}
    reader.whole(json.dumps(answer([broken])).encode())
    assert Flaw.MALFORMED in captured_of(reader).flaws


def chunks(choices: list[dict]) -> list[bytes]:
    """Returns the events with which vLLM streams these choices, a token at a time."""
    events: list[dict] = []
    for whole in choices:
        for position, token in enumerate(whole["token_ids"]):
            part = {"index": whole["index"], "text": "x", "finish_reason": None, "stop_reason": None}
            part |= {"logprobs": logprobs_of([whole["logprobs"]["token_logprobs"][position]]), "token_ids": [token]}
            part["prompt_token_ids"] = whole["prompt_token_ids"] if position == 0 else None
            if position == len(whole["token_ids"]) - 1:
                part["finish_reason"] = "stop"
            events.append({"id": "cmpl-1", "object": "text_completion", "choices": [part], "usage": None})
    events.append({"id": "cmpl-1", "object": "text_completion", "choices": [], "usage": answer(choices)["usage"]})
    return [b"data: %s\n\n" % json.dumps(event).encode() for event in events] + [b"data: [DONE]\n\n"]


@given(
    ids=st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 4000), max_size=8),
)
def test_however_a_stream_is_cut_the_capture_is_that_of_the_whole_answer(ids: list[list[int]], cuts: list[int]) -> None:
    choices = [choice(index, tokens, prompt=[index + 1, 9]) for index, tokens in enumerate(ids)]
    whole = COMPLETIONS.reader(Asked())
    whole.whole(json.dumps(answer(choices)).encode())
    stream = b"".join(chunks(choices))
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    reader, splitter, passed = COMPLETIONS.reader(Asked()), EventSplitter(1 << 20), b""
    for start, end in itertools.pairwise(edges):
        passed += b"".join(reader.event(event) for event in splitter.feed(stream[start:end]))
    assert captured_of(reader) == captured_of(whole)
    assert captured_of(reader).flaws == ()
    assert b"token_ids" not in passed
    assert b"token_logprobs" not in passed
    assert b"completion_tokens" not in passed
    assembled = json.loads(COMPLETIONS.assemble(reader.collected.payloads))
    assert [c["text"] for c in assembled["choices"]] == ["x" * len(tokens) for tokens in ids]
    assert {c["finish_reason"] for c in assembled["choices"]} == {"stop"}


def test_the_logprobs_that_an_agent_asked_for_are_put_together_in_parallel_lists() -> None:
    reader = COMPLETIONS.reader(Asked(logprobs=True))
    for event in chunks([choice(0, [5, 6, 7], prompt=[1])]):
        reader.event(event)
    assembled = json.loads(COMPLETIONS.assemble(reader.collected.payloads))
    assert assembled["choices"][0]["logprobs"] == logprobs_of([-5, -6, -7])


def test_embeddings_pass_as_they_are_and_their_usage_is_read() -> None:
    api = EmbeddingsApi()
    request = b'{"model":"e","input":["a"],"encoding_format":"base64","odd":1.50}'
    assert api.body(api.parse(request).fields, stream=False, capture=False) == request
    reader = api.reader(Asked())
    body = b'{"object": "list",  "data": [{"embedding": "AAAA"}], "usage": {"prompt_tokens": 3, "total_tokens": 3}}'
    assert reader.whole(body) == body
    captured = decode_capture(reader.collected, default_version=0)
    assert (captured.usage.prompt, captured.usage.completion) == (3, None)
    assert reader.collected.complete
    with pytest.raises(ArgumentInvalid, match="input"):
        api.parse(b'{"model":"e"}')


def test_an_answer_that_is_no_json_is_passed_and_marked() -> None:
    reader = EmbeddingsApi().reader(Asked())
    assert reader.whole(b"nope") == b"nope"
    assert reader.collected.malformed
