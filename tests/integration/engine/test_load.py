import asyncio
import threading
from dataclasses import replace

import pytest

from fulmen_algorithm.engines.embedded.protocol import Sampling
from fulmen_algorithm.engines.embedded.weights import prepare_full
from fulmen_algorithm.training.policy import PolicyModel
from tests.support.algorithm.embedded_engine import GATE_DEADLINE_S, Engine, chat_body, logprobs_in, teacher_forced

GREEDY = Sampling(temperature=0.0, top_p=1.0, max_tokens=4, stop=(), seed=None)


class Gate:
    """Holds the model thread at a request's first token until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self._open = threading.Event()
        self._reached = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.task = asyncio.create_task(engine.generator.generate([4, 7], GREEDY, self._on_token))

    def _on_token(self, _) -> bool:
        self._loop.call_soon_threadsafe(self._reached.set)
        assert self._open.wait(GATE_DEADLINE_S)
        return True

    async def reached(self) -> None:
        await asyncio.wait_for(self._reached.wait(), GATE_DEADLINE_S)

    async def open(self) -> None:
        self._open.set()
        await asyncio.wait_for(self.task, GATE_DEADLINE_S)


async def test_all_waiting_calls_go_into_one_batch(engine, greedy_without_end):
    gate = Gate(engine)
    await gate.reached()
    ask = {"temperature": 0, "max_tokens": 10, "messages": [{"role": "user", "content": greedy_without_end}]}
    asked = [asyncio.create_task(engine.chat(**ask)) for _ in range(16)]
    await engine.until_waiting(16)
    before = await engine.stats()
    await gate.open()
    answers = await asyncio.gather(*asked)
    after = await engine.stats()
    assert {status for status, _ in answers} == {200}
    assert after["batches"] - before["batches"] == 1
    assert after["largest_batch"] == 16
    # Sixteen answers of ten tokens took as many forward passes as one (and one more for the gate).
    assert after["forward_passes"] - before["forward_passes"] == 10
    assert after["tokens"] - before["tokens"] == 160


async def test_a_full_queue_and_a_passed_deadline_answer_503(engine):
    limits = engine.generator.limits
    engine.generator.limits = replace(limits, max_waiting=2)
    gate = Gate(engine)
    await gate.reached()
    waiting = [asyncio.create_task(engine.chat()) for _ in range(2)]
    await engine.until_waiting(2)
    async with engine.client.post("/v1/chat/completions", json=chat_body()) as response:
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
    await gate.open()
    assert [status for status, _ in await asyncio.gather(*waiting)] == [200, 200]
    gate = Gate(engine)
    await gate.reached()
    engine.generator.limits = replace(limits, queue_deadline_s=0.5)
    assert [status for status, _ in await asyncio.gather(engine.chat(), engine.chat())] == [503, 503]
    engine.generator.limits = limits
    await gate.open()
    assert (await engine.chat())[0] == 200


async def test_a_caller_that_disconnects_frees_its_place(engine):
    gate = Gate(engine)
    await gate.reached()
    left = asyncio.create_task(engine.chat())
    await engine.until_waiting(1)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    stays = asyncio.create_task(engine.chat())
    await gate.open()
    assert (await stays)[0] == 200


async def test_weights_swap_in_mid_answer_and_the_answer_says_where(engine, model_dirs, policies):
    versions, logprobs, ids = [], [], []
    third = asyncio.Event()
    resume = threading.Event()
    loop = asyncio.get_running_loop()

    def on_token(token) -> bool:
        ids.append(token.token_id)
        versions.append(token.version)
        logprobs.append(token.logprob)
        if len(ids) == 3:
            loop.call_soon_threadsafe(third.set)
            assert resume.wait(GATE_DEADLINE_S)
        return len(ids) == 6

    prompt = [4, 7, 8, 5]
    running = asyncio.create_task(engine.generator.generate(prompt, replace(GREEDY, max_tokens=6), on_token))
    await asyncio.wait_for(third.wait(), GATE_DEADLINE_S)
    weights = prepare_full(engine.generator.model, model_dirs[1])
    swapping = asyncio.create_task(engine.generator.swap(weights, 9))
    await asyncio.sleep(0)  # lets the swap enter the queue
    resume.set()
    assert await asyncio.wait_for(swapping, GATE_DEADLINE_S) > 0
    await asyncio.wait_for(running, GATE_DEADLINE_S)
    assert versions == [0, 0, 0, 9, 9, 9]
    answer = {"prompt_token_ids": prompt, "choices": [{"token_ids": ids}]}
    assert logprobs[:3] == pytest.approx(teacher_forced(policies[0], answer)[:3], abs=1e-4)
    assert logprobs[3:] != pytest.approx(teacher_forced(policies[0], answer)[3:], abs=1e-3)


async def test_swaps_under_load_fail_no_request_and_versions_are_true(engine, model_dirs, policies):
    done = asyncio.Event()
    answers = []

    async def ask_on(number: int) -> None:
        while not done.is_set():
            answers.append(await engine.chat(max_tokens=6, seed=number))

    askers = [asyncio.create_task(ask_on(n)) for n in range(12)]
    for version in range(1, 13):
        status, swapped = await engine.swap(model_dirs[version % 2], version)
        assert (status, swapped["version"]) == (200, version)
        assert swapped["pause_seconds"] >= 0
        answers += await asyncio.gather(*(engine.chat(max_tokens=6) for _ in range(3)))
    done.set()
    await asyncio.gather(*askers)
    assert {status for status, _ in answers} == {200}
    whole = [a for _, a in answers if len(a["weight_versions"]) == 1]
    assert len({a["weight_versions"][0]["version"] for a in whole}) >= 6
    for answer in whole:
        policy: PolicyModel = policies[answer["weight_versions"][0]["version"] % 2]
        assert logprobs_in(answer) == pytest.approx(teacher_forced(policy, answer), abs=1e-4)
    for _, answer in answers:
        ranges = answer["weight_versions"]
        assert [r["start"] for r in ranges] == [0, *(r["end"] for r in ranges[:-1])]
        assert ranges[-1]["end"] == answer["usage"]["completion_tokens"]
        assert [r["version"] for r in ranges] == sorted(r["version"] for r in ranges)


async def test_weights_that_do_not_fit_are_refused_and_nothing_changes(engine, policies, tmp_path, model_dirs):
    from safetensors.torch import load_file, save_file

    _, before = await engine.chat(temperature=0)
    assert (await engine.swap(tmp_path / "nowhere", 5))[0] == 422
    weights = load_file(model_dirs[1] / "model.safetensors")
    for name, broken in {
        "missing": {k: v for k, v in weights.items() if "norm" not in k},
        "strange": {**weights, "extra.weight": weights["model.norm.weight"].clone()},
        "shape": {**weights, "model.norm.weight": weights["model.norm.weight"][:-1].clone()},
    }.items():
        (tmp_path / name).mkdir()
        save_file(broken, tmp_path / name / "model.safetensors")
        status, answer = await engine.swap(tmp_path / name, 5)
        assert status == 422, name
        assert answer["error"]["param"] == "path"
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\x00" * 20)
    assert (await engine.swap(tmp_path / "damaged", 5))[0] == 422
    _, after = await engine.chat(temperature=0)
    assert before["choices"][0]["token_ids"] == after["choices"][0]["token_ids"]
    async with engine.client.get("/admin/weights") as response:
        assert (await response.json())["version"] == 0
