"""Loops outside of the service: what they train, and that nothing of it is lost or done twice, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import fulmen
from fulmen.algorithm.v1 import trainer_service_pb2 as pb
from fulmen.errors import (
    ArgumentInvalid,
    CheckpointNotFound,
    ModelNotFound,
    QuotaExceeded,
    SettingsInvalid,
    TrainerExists,
    TrainerLost,
    TrainerNotFound,
    TrainerSequenceInvalid,
)
from tests.support.algorithm.models import small_model
from tests.support.algorithm.outside_loops import LORA, ROWS, client_of, steps
from tests.support.services import serving, target_of
from tests.support.store.running import StoreHandle

LIMIT_S = 90.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def serve(store: StoreHandle, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """Yields what starts a service in this process and returns a client of it."""
    parts: Any = None
    async with AsyncExitStack() as stack:

        async def serve(**changes: Any) -> fulmen.AsyncClient:
            nonlocal parts
            given = {"model_roots": "/", "roles": True, "trains": True, **changes}
            parts = await stack.enter_async_context(serving("algorithm", store, tmp_path, **given))
            stack.push_async_callback(parts.drain)
            return await stack.enter_async_context(client_of(store, target_of(parts)))

        serve.pids = lambda: [each.pid for each in parts.roles["trainers"]._processes._running.values()]  # type: ignore[attr-defined]
        yield serve


async def test_a_loop_learns_to_say_what_it_is_shown(serve: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    client = await serve()
    question = [{"role": "user", "content": "1+1"}]
    async with await client.trainer(model, policy="said", learning_rate=1e-2) as trainer:
        row = await trainer.render([*question, {"role": "assistant", "content": "2"}])
        for _ in range(30):
            loss = (await trainer.forward_backward([row])).loss
            stepped = await trainer.optim_step()
        assert loss < 0.1
        assert (stepped.step, stepped.skipped) == (30, False)
        said = await trainer.sample(question, n=2, max_tokens=4, temperature=0)
        assert [(each.text, each.stopped) for each in said] == [("2", True)] * 2
        version = await trainer.publish(alias="best")
        assert await trainer.publish() == version
        assert (await client.models.get("said", version="best")).name == version
        folder = await client.models.download(version, tmp_path / "all")
        assert load_file(folder / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()
    assert not (await client.trainers.get(trainer.id)).proto.loaded
    assert (await trainer.sample(question, max_tokens=4, temperature=0))[0].text == "2"
    for policy in ("", "other"):
        successor = await client.trainer(version, policy=policy)
        assert successor.policy == (policy or "said")
        assert (await successor.sample(question, max_tokens=4, temperature=0))[0].text == "2"


@pytest.mark.long(short=True)
async def test_adapters_are_published_with_their_base_and_merged(
    serve: Callable[..., Any], model: Path, tmp_path: Path
) -> None:
    client = await serve(keep_models=1)
    trainer = await client.trainer(model, policy="adapted", lora=LORA)
    losses = await steps(trainer, range(0, 30, 3))
    assert losses[-1] < losses[0]
    before = await trainer.publish()
    await steps(trainer, range(1))
    version = await trainer.publish()
    assert version != before

    folder = await client.models.download(version, tmp_path / "adapters")
    assert (folder / "default/adapter_model.safetensors").exists()
    merged = await client.trainer(await client.models.download(version, tmp_path / "merged", full=True), policy="p")
    of_merged, expected = (await merged.forward(ROWS)).logprobs, (await trainer.forward(ROWS)).logprobs
    for row, wanted in zip(of_merged, expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-4)
    # The weights of older versions are removed, and versions stay when their trainer is deleted.
    with pytest.raises(ModelNotFound):
        await client.models.download(before, tmp_path / "gone")
    await trainer.delete()
    await client.models.download(version, tmp_path / "again", full=True)


@pytest.mark.long(short=True)
async def test_a_policy_gradient_prefers_what_was_rewarded(serve: Callable[..., Any], model: Path) -> None:
    client = await serve()
    trainer = await client.trainer(model, policy="taught", learning_rate=1e-2)
    prompt = [8, 9, 10]

    def reward(ids: list[int]) -> float:
        return float(ids[0] % 2)

    async def mean_reward() -> float:
        drawn = await trainer.sample(prompt, n=64, max_tokens=1, seed=0)
        return sum(reward(list(each.token_ids)) for each in drawn) / 64

    before = await mean_reward()
    for loss in 3 * ("reinforce", "clip", "importance", "gspo", "cispo", "sapo", "dppo"):
        drawn = await trainer.sample(prompt, n=32, max_tokens=1, seed=trainer.step)
        rewards = [reward(list(each.token_ids)) for each in drawn]
        mean = sum(rewards) / len(rewards)
        rows = [each.row(one - mean) for each, one in zip(drawn, rewards, strict=True)]
        result = await trainer.forward_backward(rows, loss=loss)
        # The rows are the present weights' own.
        assert result.metrics["kl_sampler_trainer"] < 1e-6
        await trainer.optim_step()
    assert await mean_reward() > max(before, 0.9)


async def test_a_call_that_is_sent_again_is_carried_out_once(serve: Callable[..., Any], model: Path) -> None:
    client = await serve()
    once, often = [await client.trainer(model, policy="p", lora=LORA, seed=3) for _ in range(2)]
    await steps(once, range(3))

    stub, sequence = client.services.trainers, 0
    for number in range(3):
        rows = [row.message() for row in ROWS[number % 3 :]]
        backward = pb.ForwardBackwardRequest(name=often.name, sequence=sequence + 1, rows=rows, loss="cross_entropy")
        answers = [await stub.ForwardBackward(backward) for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        adam = pb.AdamSettings(learning_rate=1e-2)
        step = pb.OptimStepRequest(name=often.name, sequence=sequence + 2, adam=adam)
        # At the same time: one waits for the other.
        assert len({each.step for each in await asyncio.gather(*(stub.OptimStep(step) for _ in range(3)))}) == 1
        sequence += 2
        with pytest.raises(TrainerSequenceInvalid) as refused:
            await stub.ForwardBackward(backward)
        assert refused.value.metadata["sequence"] == str(sequence)
        backward.sequence = sequence + 2
        with pytest.raises(TrainerSequenceInvalid):
            await stub.ForwardBackward(backward)

    await often.refresh()
    assert (await often.forward(ROWS)).logprobs == (await once.forward(ROWS)).logprobs


async def test_a_process_that_ends_takes_no_other_state_with_it(serve: Callable[..., Any], model: Path) -> None:
    client = await serve()
    trainers = [await client.trainer(model, policy="p", lora=LORA, seed=n) for n in range(2)]
    for each in trainers:
        await steps(each, range(2))
    [pid] = serve.pids()  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)

    with pytest.raises(TrainerLost, match="continues at optimizer step 2"):
        await trainers[0].forward_backward(ROWS)
    for each in trainers:
        await steps(each, range(2, 4))
        assert each.step == 4


@pytest.mark.long(short=True)
async def test_an_idle_trainer_leaves_memory_with_its_gradient_and_comes_back(
    serve: Callable[..., Any], model: Path
) -> None:
    client = await serve(trainer_idle_s=0.5)
    trainer, other = [await client.trainer(model, policy="p", lora=LORA) for _ in range(2)]
    await trainer.forward_backward(ROWS[:3])
    async with asyncio.timeout(LIMIT_S):
        while (await client.trainers.get(trainer.id)).proto.loaded:  # noqa: ASYNC110  # state of the service
            await asyncio.sleep(0.1)
    await trainer.forward_backward(ROWS[3:])
    await trainer.optim_step(learning_rate=1e-2)
    await other.forward_backward(ROWS)
    await other.optim_step(learning_rate=1e-2)

    found, expected = (await trainer.forward(ROWS)).logprobs, (await other.forward(ROWS)).logprobs
    for row, of_other in zip(found, expected, strict=True):
        assert row == pytest.approx(of_other, abs=1e-5)


@pytest.mark.long(short=True)
async def test_an_unused_trainer_is_deleted(serve: Callable[..., Any], model: Path) -> None:
    client = await serve(trainer_keep_s=0.5, trainer_idle_s=0.2)
    trainer = await client.trainer(model, policy="p", lora=LORA)
    async with asyncio.timeout(LIMIT_S):
        while [each async for each in client.trainers.list()]:  # noqa: ASYNC110  # state of the service
            await asyncio.sleep(0.1)
    with pytest.raises(TrainerNotFound):
        await trainer.forward_backward(ROWS)


@pytest.mark.long(short=True)
async def test_the_least_used_process_makes_room(serve: Callable[..., Any], model: Path) -> None:
    client = await serve(max_trainer_processes=1)
    first, second = [await client.trainer(model, policy="p") for _ in range(2)]
    for number in range(2):
        await steps(first, range(number, number + 1))
        await steps(second, range(number, number + 1))
    assert (await first.forward(ROWS)).logprobs == (await second.forward(ROWS)).logprobs
    assert len(serve.pids()) == 1  # type: ignore[attr-defined]


async def test_bad_requests_name_every_problem_and_change_nothing(serve: Callable[..., Any], model: Path) -> None:
    client = await serve(max_trainers=2, max_trainer_checkpoints=1, max_trainer_rows=8, max_trainer_tokens=64)
    with pytest.raises(SettingsInvalid) as bad:
        await client.trainer(
            model, policy="A!", lora=fulmen.Lora(rank=0, alpha=-1.0, dropout=2.0), learning_rate=-1.0, seed=-1
        )
    fields = {each.field for each in bad.value.violations}
    assert fields == {"policy.name", "lora.alpha", "lora.dropout", "adam.learning_rate", "seed"}
    for given, field in (
        ({"base": "/nowhere"}, "policy"),
        ({"base": model, "lora": fulmen.Lora(targets=["nothing"])}, "lora.targets"),
        ({"base": "model:missing"}, "policy.base"),
    ):
        with pytest.raises(SettingsInvalid) as refused:
            await client.trainer(policy="p", **given)
        assert [each.field for each in refused.value.violations] == [field]
    assert not [each async for each in client.trainers.list()]

    trainer = await client.trainer(model, policy="p", lora=LORA)
    with pytest.raises(ArgumentInvalid) as rows:
        await trainer.forward_backward(
            [
                fulmen.Row(token_ids=[1]),
                fulmen.Row(token_ids=[1, -2]),
                fulmen.Row(token_ids=[1, 10**6], weights=[1.0, float("nan")], advantages=[1.0]),
                fulmen.Row(token_ids=[1, 2], weights=[1.0, 1.0], advantages=[0.0, float("inf")]),
            ],
            loss="clip",
        )
    named = [each.field for each in rows.value.violations]
    assert {name.partition(".")[0] for name in named} == {f"rows[{n}]" for n in range(4)}
    assert len(named) >= 10
    for call, field in (
        (trainer.forward_backward([]), "rows"),
        (trainer.forward_backward(ROWS * 2), "rows"),
        (trainer.forward_backward([fulmen.Row(token_ids=[1] * 40)] * 2), "rows"),
        (trainer.forward_backward(ROWS, loss="clop"), "loss"),
        (trainer.forward_backward(ROWS, loss="reinforce", settings={"low": 1}), "loss_settings_json.low"),
        (trainer.forward_backward(ROWS, temperature=-1.0), "temperature"),
        (trainer.optim_step(learning_rate=1e-3), "name"),
        (trainer.optim_step(learning_rate=float("inf")), "adam.learning_rate"),
        (trainer.optim_step(), "adam.learning_rate"),
        (trainer.sample([], max_tokens=1), "prompt_ids"),
        (trainer.sample([1, 10**6], max_tokens=1), "prompt_ids"),
        (trainer.sample([1], max_tokens=10**6), "max_tokens"),
        (trainer.sample([1], n=50, max_tokens=50), "completion_count"),
        (trainer.sample([1], max_tokens=1, temperature=float("nan")), "temperature"),
        (trainer.sample([1], max_tokens=1, top_p=0.0), "top_p"),
        (trainer.render([{"content": "no role"}]), "messages_json"),
        (trainer.save("../../up"), "checkpoint"),
        (trainer.save(".."), "checkpoint"),
        (trainer.publish(alias="latest"), "alias"),
    ):
        with pytest.raises(ArgumentInvalid) as one:
            await call
        assert [each.field for each in one.value.violations] == [field]
    assert (await trainer.refresh()).proto.sequence == 0

    await trainer.save("a")
    await trainer.save("a")
    with pytest.raises(QuotaExceeded, match="replaces"):
        await trainer.save("b")
    with pytest.raises(CheckpointNotFound):
        await client.trainer(checkpoint=f"{trainer.name}/checkpoints/b")
    await client.trainer(checkpoint=f"{trainer.name}/checkpoints/a")
    with pytest.raises(QuotaExceeded, match="max_trainers"):
        await client.trainer(model, policy="p", lora=LORA)


async def test_a_project_whose_trainers_fill_the_disk_adds_nothing(serve: Callable[..., Any], model: Path) -> None:
    client = await serve(max_trainer_bytes=1)
    trainer = await client.trainer(model, policy="p", lora=LORA)
    await steps(trainer, range(1))
    for adding in (trainer.save("a"), client.trainer(model, policy="p", lora=LORA)):
        with pytest.raises(QuotaExceeded, match="max_trainer_bytes"):
            await adding
    await trainer.delete()
    await client.trainer(model, policy="p", lora=LORA)


@pytest.mark.long(short=True)
async def test_a_request_to_create_that_is_sent_again_creates_one(serve: Callable[..., Any], model: Path) -> None:
    client = await serve()
    request = pb.CreateTrainerRequest(request_id="same")
    request.policy.name, request.policy.path = "p", str(model)
    create = client.services.trainers.CreateTrainer
    names = {each.trainer.name for each in await asyncio.gather(*(create(request) for _ in range(4)))}
    assert names == {(await create(request)).trainer.name}
    request.seed = 1
    with pytest.raises(TrainerExists):
        await create(request)
