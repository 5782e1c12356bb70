"""Experts that an engine reports reach the store with their call, and never the agent."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest

from fulmen.model_call import read_experts
from fulmen.routed_experts import MAX_BYTES
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen_llm_proxy.apis.chat_reader import ChatReader
from fulmen_llm_proxy.apis.collected import Asked
from fulmen_llm_proxy.calls.replay.captured_calls import CapturedCall
from fulmen_llm_proxy.capture.decode import Flaw, decode_capture
from tests.support.llm_proxy.finished_calls import CODEC, batches, finished

LOGPROBS = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}


def written(experts: np.ndarray) -> str:
    """Writes experts as vLLM does (`numpy2base64`)."""
    file = io.BytesIO()
    np.save(file, experts, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def answer(routed: object, *, prompt: int = 3) -> dict:
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "ab"},
        "logprobs": LOGPROBS,
        "token_ids": [5, 6],
        "finish_reason": "stop",
        "routed_experts": routed,
    }
    usage = {"prompt_tokens": prompt, "completion_tokens": 2}
    return {"id": "x", "choices": [choice], "usage": usage, "prompt_token_ids": [1] * prompt}


def read(document: dict, asked: Asked | None = None) -> tuple[dict, ChatReader]:
    reader = ChatReader(asked or Asked())
    return json.loads(reader.whole(json.dumps(document).encode())), reader


def recorded(document: dict) -> ModelCallRecord:
    _, reader = read(document)
    call = finished({"model": "tiny", "messages": []}, reader.collected)
    (batch,) = batches(CODEC.pack([CODEC.encode(call)]))
    return ModelCallRecord.FromString(batch.spans[0].model_call)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_experts_are_recorded_with_their_call(dtype: type) -> None:
    experts = np.arange(4 * 3 * 2, dtype=dtype).reshape(4, 3, 2)
    record = recorded(answer(written(experts)))
    assert record.usable
    found = read_experts(record.routed_experts)
    assert (found.layers, found.top_k, found.spans) == (3, 2, ((0, 4),))
    assert np.frombuffer(found.packed, dtype).reshape(4, 3, 2).tolist() == experts.tolist()


@pytest.mark.parametrize("asked", [Asked(), Asked(token_ids=True, logprobs=True)])
def test_an_agent_gets_no_experts(asked: Asked) -> None:
    passed, _ = read(answer(written(np.zeros((4, 1, 1), np.uint8))), asked)
    assert "routed_experts" not in passed["choices"][0]
    assert passed["choices"][0]["message"]["content"] == "ab"


def test_an_answer_without_experts_records_none_and_passes_unchanged() -> None:
    for document in (answer(None), {**answer(None), "choices": [{**answer(None)["choices"][0]}]}):
        record = recorded(document)
        assert record.usable
        assert not record.HasField("routed_experts")
    passed, _ = read(answer(None), Asked(token_ids=True, logprobs=True))
    assert passed == answer(None)


def test_of_a_long_call_the_newest_tokens_are_recorded_within_the_bound() -> None:
    experts = np.random.default_rng(0).integers(0, 128, (5001, 48, 8), dtype=np.uint8)
    record = recorded(answer(written(experts), prompt=5000))
    assert record.usable
    assert record.routed_experts.first_token == 5001 - MAX_BYTES // (48 * 8)
    assert record.routed_experts.experts == experts[record.routed_experts.first_token :].tobytes()


@pytest.mark.parametrize(
    "wrong",
    [
        7,
        "no base64!",
        base64.b64encode(b"no file").decode(),
        written(np.zeros((4, 3), np.uint8)),
        written(np.zeros((4, 3, 2), np.float32)),
        written(np.zeros((4, 3, 2), np.int64)),
        written(np.zeros((6, 3, 2), np.uint8)),
        written(np.zeros((4, 0, 2), np.uint8)),
        base64.b64encode(base64.b64decode(written(np.zeros((4, 3, 2), np.uint8)))[:-1]).decode(),
    ],
)
def test_a_call_with_experts_of_another_form_is_marked(wrong: object) -> None:
    _, reader = read(answer(wrong))
    assert decode_capture(reader.collected, default_version=3).flaws == (Flaw.EXPERTS_INVALID,)
    record = recorded(answer(wrong))
    assert (record.usable, record.unusable_reason) == (False, "routed_experts_invalid")


def test_a_call_that_is_answered_from_a_capture_has_its_experts_again() -> None:
    experts = np.arange(4 * 3 * 2, dtype=np.uint8).reshape(4, 3, 2)
    first = recorded(answer(written(experts)))
    call = CapturedCall(span_id="0" * 16, digest=b"", policy="p", was_seen=True, choices={0: first}, size_bytes=1)
    assert recorded(json.loads(call.answer())).routed_experts == first.routed_experts
