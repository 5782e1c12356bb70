"""A run records its inputs, packages and machine at its first start."""

import asyncio
import hashlib
import os
import threading
from dataclasses import replace

from fulmen_algorithm.runs.provenance import provenance
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec, RunState
from tests.support.algorithm.model_services import Crashes, ModelResources
from tests.support.algorithm.run_service import WAIT_S, created, working


async def test_contents_weights_packages_and_machine_are_recorded_once(world, grpo_draft, open_service):
    run = await created(grpo_draft, world)
    world.crashes = Crashes(at_call=14)
    async with working(open_service(world)) as service:
        service.runs.add(run)
        await world.crashes.killed.wait()
        first = service.runs.entry(run.name).run.provenance
        await service.worker.drain()
    world.crashes = Crashes()
    async with working(open_service(world)) as service:
        done = await service.finish(run)

    assert done.state is RunState.SUCCEEDED
    assert done.provenance == first
    tasks = world.resources["resources/dataset.train"][0]
    assert first["input.train_tasks.sha256"] == hashlib.sha256(tasks).hexdigest()
    assert first["device"] == "cpu"
    assert {"package.torch", "package.fulmen", "python", "policy.first_weights.sha256"} <= set(first)


async def test_weights_of_any_size_are_digested_beside_the_event_loop(world, sft_draft, tmp_path, monkeypatch):
    monkeypatch.setattr("fulmen_algorithm.runs.provenance.parameters_of", lambda folder: 7)
    run = await created(sft_draft, world)
    os.mkfifo(tmp_path / "model.safetensors")
    loop, goes_on = asyncio.get_running_loop(), threading.Event()

    def feed() -> bool:
        # Opened as soon as somebody reads; whoever reads in the event loop keeps it from going on.
        with (tmp_path / "model.safetensors").open("wb") as pipe:
            loop.call_soon_threadsafe(goes_on.set)
            went_on = goes_on.wait(WAIT_S / 10)
            pipe.write(b"weights")
        return went_on

    fed = loop.run_in_executor(None, feed)
    try:
        found = await provenance(run, resources=ModelResources(world), first_weights=tmp_path, machine={})
    finally:
        # Lets the thread go on if nobody has read: the event loop waits for it.
        os.close(os.open(tmp_path / "model.safetensors", os.O_RDWR | os.O_NONBLOCK))
    assert await fed
    assert found["policy.parameters"] == "7"
    assert found["policy.first_weights.sha256"] == hashlib.sha256(hashlib.sha256(b"weights").digest()).hexdigest()


async def test_the_newest_version_is_recorded_as_the_one_that_it_was(world, grpo_draft, sft_draft, service):
    first = await created(sft_draft, world)
    service.runs.add(first)
    ended = await service.finish(first)
    newest = replace(
        grpo_draft,
        name="projects/default/trainingRuns/second",
        policy=PolicySpec(name="tiny", origin=PolicyOrigin.NEWEST),
    )
    second = await created(newest, world)
    service.runs.add(second)
    done = await service.finish(second)

    assert done.state is RunState.SUCCEEDED
    assert done.provenance["policy.first_version"] == ended.policy_version
