"""Loops outside of the service under kills: what was acknowledged is kept, what was lost is said, nothing is done twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from fulmen.client.aio.trainers import AsyncTrainer
from fulmen.errors import ModelNotFound, TrainerLost, TrainerNotFound, TrainerSequenceInvalid
from fulmen_service_kit.security.tokens import Role
from tests.support.algorithm.machine import Machine
from tests.support.algorithm.models import small_model
from tests.support.algorithm.outside_loops import LORA, ROWS, client_of, steps
from tests.support.store.running import StoreHandle

pytestmark = pytest.mark.long(short=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def machine(store: StoreHandle, tmp_path: Path) -> AsyncIterator[Machine]:
    token = store.token(Role.SERVICE, project="projects/*")
    machine = Machine(store.target, token, tmp_path, model_roots="/")
    await machine.start()
    yield machine
    await machine.stop()


async def test_a_killed_service_loses_what_was_not_saved_says_so_and_continues(
    store: StoreHandle, machine: Machine, model: Path
) -> None:
    async with client_of(store, machine.address) as client:
        for lora in (LORA, None):
            undisturbed = await client.trainer(model, policy="p", lora=lora)
            await steps(undisturbed, range(4))
            expected = (await undisturbed.forward(ROWS)).logprobs
            await undisturbed.delete()

            trainer = await client.trainer(model, policy="p", lora=lora)
            await steps(trainer, range(2))
            checkpoint = await trainer.save("two")
            await trainer.forward_backward(ROWS[2:])  # is lost
            await machine.restart()

            with pytest.raises(TrainerSequenceInvalid, match="optimizer step 2 after call 4") as told:
                await trainer.optim_step(learning_rate=1e-2)
            assert (told.value.metadata["step"], trainer.step) == ("2", 2)
            await steps(trainer, range(2, 4))
            assert (await trainer.forward(ROWS)).logprobs == expected

            if lora is not None:
                # Every step of it is saved.
                await machine.restart()
                assert (await trainer.forward(ROWS)).logprobs == expected
            again = await client.trainer(checkpoint=checkpoint)
            assert (again.policy, again.step) == ("p", 2)
            await steps(again, range(2, 4))
            assert (await again.forward(ROWS)).logprobs == expected
            await again.delete()
            await trainer.delete()


@pytest.mark.long
async def test_a_loop_under_kills_trains_what_an_undisturbed_one_does(
    store: StoreHandle, machine: Machine, model: Path
) -> None:
    chance, count = random.Random(7), 30
    async with client_of(store, machine.address) as client:
        told = 0

        async def trained(trainer: AsyncTrainer) -> Sequence[Sequence[float]]:
            nonlocal told
            while trainer.step < count:
                rows = ROWS[trainer.step % 3 :]
                try:
                    await trainer.forward_backward(rows[:1], fresh=True)
                    await trainer.forward_backward(rows[1:])
                    await trainer.optim_step(learning_rate=1e-2)
                except (TrainerSequenceInvalid, TrainerLost):
                    told += 1
            return (await trainer.forward(ROWS)).logprobs

        expected = await trained(await client.trainer(model, policy="p", lora=LORA))
        assert not told
        trainer = await client.trainer(model, policy="p", lora=LORA)

        async def killing() -> None:
            for _ in range(5):
                step = trainer.step + chance.randrange(1, 5)
                while trainer.step < step:  # noqa: ASYNC110  # state of the loop
                    await asyncio.sleep(0.001)
                await asyncio.sleep(chance.uniform(0, 0.02))
                await machine.restart()

        killer = asyncio.create_task(killing())
        assert await trained(trainer) == expected
        await killer
        assert told


async def test_a_service_that_is_stopped_saves_everything_and_what_is_damaged_stops_nothing(
    store: StoreHandle, machine: Machine, model: Path, tmp_path: Path
) -> None:
    async with client_of(store, machine.address) as client:
        trainer, damaged, unreadable = [await client.trainer(model, policy="p", lora=LORA) for _ in range(3)]
        for each in (trainer, damaged):
            await each.forward_backward(ROWS)
        await machine.stop()
        folder = tmp_path / "state/trainers/default"
        next((folder / damaged.id / "state").rglob("*.safetensors")).write_bytes(b"no weights")
        (folder / unreadable.id / "trainer.json").write_text("{}")
        await machine.start()

        assert (await trainer.optim_step(learning_rate=1e-2)).step == 1
        with pytest.raises(ModelNotFound, match="damaged"):
            await damaged.optim_step(learning_rate=1e-2)
        with pytest.raises(TrainerNotFound):
            await unreadable.forward_backward(ROWS)
        await damaged.delete()
        assert [each.id async for each in client.trainers.list()] == [trainer.id]
