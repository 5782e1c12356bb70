"""What the module beside vLLM adds to streams; that vLLM has what it replaces is tested with vLLM itself."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace

import numpy as np

from fulmen.routed_experts import read_npy
from fulmen_algorithm.engines.vllm_plugin import fulmen_vllm


async def test_the_last_event_of_a_choice_carries_the_experts_and_versions_of_its_tokens():
    experts = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    span = SimpleNamespace(version="7", start=0, end=2)
    running = SimpleNamespace(outputs=[SimpleNamespace(index=0, routed_experts=None, weight_versions=None)])
    ended = SimpleNamespace(outputs=[SimpleNamespace(index=0, routed_experts=experts, weight_versions=[span])])

    async def results():
        for each in (running, ended):
            yield each

    added: fulmen_vllm.Fields = {}
    assert [each async for each in fulmen_vllm._watched(results(), added)] == [running, ended]
    event = 'data: {"choices": [{"index": 0, "finish_reason": "stop"}, {"index": 1, "finish_reason": null}]}\n\n'
    done, other = json.loads(fulmen_vllm._with_fields(event, added).removeprefix("data: "))["choices"]
    assert read_npy(base64.b64decode(done["routed_experts"])).packed == experts.tobytes()
    assert done["weight_versions"] == [{"version": 7, "start": 0, "end": 2}]
    assert other == {"index": 1, "finish_reason": None}
