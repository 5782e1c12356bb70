"""What is stripped from an answer, what is kept, and how a capture is judged."""

from __future__ import annotations

import json

import pytest

from fulmen_llm_proxy.apis.chat_reader import ChatReader
from fulmen_llm_proxy.apis.collected import Asked
from fulmen_llm_proxy.capture.decode import Captured, Flaw, decode_capture

LOGPROBS = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}


def answer(**changes: object) -> dict:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "ab"},
        "logprobs": LOGPROBS,
        "token_ids": [5, 6],
        "finish_reason": "stop",
    }
    choice |= changes.pop("choice", {})  # type: ignore[arg-type]
    whole: dict = {
        "id": "x",
        "choices": [choice],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "extra": {"deep": 1}},
        "prompt_token_ids": [1, 2, 3],
        "vendor_field": 1.0,
    }
    return {key: value for key, value in (whole | changes).items() if value is not None}


def judge(document: object) -> tuple[dict, Captured]:
    reader = ChatReader(Asked())
    passed = reader.whole(json.dumps(document).encode())
    return json.loads(passed), decode_capture(reader.collected, default_version=3)


def test_the_text_of_each_token_is_kept_also_of_one_that_is_a_part_of_a_character() -> None:
    content = [
        {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]},
        {"token": "\ufffdb", "logprob": -1.5, "bytes": [0xA4, 0x62]},
    ]
    _, captured = judge(answer(choice={"logprobs": {"content": content}}))
    assert captured.flaws == ()
    assert (captured.choices[0].text, captured.choices[0].text_sizes) == ("äb".encode(), (1, 2))


@pytest.mark.parametrize(
    "strange", [{"token": 7}, {"token": None}, {"token": "\ufffd", "bytes": [999]}, {"bytes": "x"}, {}]
)
def test_strange_texts_of_tokens_do_not_spoil_a_call(strange: dict) -> None:
    content = [{"logprob": -0.5, **strange}, {"token": "b", "logprob": -1.5}]
    _, captured = judge(answer(choice={"logprobs": {"content": content}}))
    assert captured.flaws == ()
    assert len(captured.choices[0].text_sizes) == 2


def test_an_answer_without_texts_of_tokens_has_none() -> None:
    _, captured = judge(answer(choice={"logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.5}]}}))
    assert (captured.choices[0].text, captured.choices[0].text_sizes) == (b"", ())


def test_an_answer_with_nothing_to_strip_passes_byte_for_byte() -> None:
    body = b'{ "choices" : [ {"index":0, "message": {"content":"\\u00e4"}} ],   "big": 123456789012345678901234567890 }'
    assert ChatReader(Asked()).whole(body) == body


@pytest.mark.parametrize(
    ("document", "flaw"),
    [
        (answer(prompt_token_ids=[]), Flaw.PROMPT_IDS_MISSING),
        (answer(choice={"token_ids": []}), Flaw.TOKEN_IDS_MISSING),
        (answer(choice={"token_ids": [5]}), Flaw.LENGTH_MISMATCH),
        (answer(choice={"token_ids": [5, 1 << 40]}), Flaw.MALFORMED),
        (answer(choice={"token_ids": "55"}), Flaw.MALFORMED),
        (answer(choice={"logprobs": None}), Flaw.LOGPROBS_MISSING),
        (answer(choice={"logprobs": {"content": [{"logprob": "low"}]}}), Flaw.MALFORMED),
        (answer(choice={"finish_reason": None}), Flaw.FINISH_REASON_MISSING),
        (answer(usage={}), Flaw.USAGE_MISSING),
        (answer(usage={"completion_tokens": 3}), Flaw.USAGE_MISMATCH),
        (answer(choices=[]), Flaw.TOKEN_IDS_MISSING),
        (answer(weight_versions=[{"version": 1, "start": 0, "end": 1}]), Flaw.VERSIONS_INVALID),
        (answer(weight_versions=[{"version": 1, "start": 1, "end": 2}]), Flaw.VERSIONS_INVALID),
        (answer(weight_versions=[{"version": "new", "start": 0, "end": 2}]), Flaw.MALFORMED),
        (answer(error={"message": "no"}), Flaw.BACKEND_ERROR),
        (["not", "an", "object"], Flaw.MALFORMED),
    ],
)
def test_a_flaw_makes_a_call_unusable(document: object, flaw: Flaw) -> None:
    passed, captured = judge(document)
    assert flaw in captured.flaws
    assert passed is not None


def test_a_version_that_is_a_string_of_digits_is_read() -> None:
    _, captured = judge(answer(weight_versions=[{"version": "12", "start": 0, "end": 2}]))
    assert [part.version for part in captured.choices[0].versions] == [12]


@pytest.mark.parametrize("body", [b"", b"<html>", b'{"choices": 1}', b'{"choices": [1]}', b"\xff\xfe"])
def test_what_is_not_an_answer_passes_as_it_is_and_is_malformed(body: bytes) -> None:
    reader = ChatReader(Asked())
    assert reader.whole(body) == body
    assert not reader.collected.complete
    assert Flaw.MALFORMED in decode_capture(reader.collected, default_version=0).flaws
