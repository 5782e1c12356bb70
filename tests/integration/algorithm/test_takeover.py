"""Two algorithm services share a folder of runs: when one dies or hangs, the other takes its run over and ends it."""

import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.rpc.services import Services, connect
from fulmen.store.v1 import resource_service_pb2
from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_cli.local.stack import LocalStack
from tests.support.algorithm.runs import eventually
from tests.support.algorithm.second_service import SecondService, client_of, second_service
from tests.support.algorithm.small_training import SETTINGS, Watcher
from tests.support.algorithm.training import (
    check_books,
    create_run,
    finished_groups,
    publish_training_inputs,
    read_consumed,
)
from tests.support.stack import running_stack, stack_targets

pytestmark = [
    pytest.mark.serial,
    pytest.mark.timeout(600),
]

# Long enough that an owner on a busy machine keeps its lease; a run that loses it without a reason has one epoch too many.
LEASE_S = 12.0
# A stack that does nothing else takes four a second, and the run must not end before it is disturbed.
LONG_STEPS = 48
LONG = {**SETTINGS, "steps": LONG_STEPS, "checkpoint_every": 2, "validate_every": 1000}
TAKEOVER_LIMIT_S = 60.0
PENDING, RUNNING = pb.TRAINING_RUN_STATE_PENDING, pb.TRAINING_RUN_STATE_RUNNING


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A stack, a second algorithm service, and clients that ask one each."""

    stack: LocalStack
    second: SecondService
    first_client: Services
    second_client: Services
    runs: Path

    @property
    def first_address(self) -> str:
        return self.stack.targets["algorithm"]

    async def owner(self, run: str) -> str:
        """Returns the address of the service that runs a run, as the second service tells; empty if it is that one, or none."""
        answer = await self.second_client.training_runs.GetTrainingRun(service_pb.GetTrainingRunRequest(name=run))
        return answer.training_run.owner_address

    def other_than(self, address: str) -> tuple[str, Services]:
        """Returns the address of the other service, and its client."""
        if address == self.first_address:
            return self.second.address, self.second_client
        return self.first_address, self.first_client

    def pid(self, address: str) -> int:
        """Returns the process of a service."""
        return self.stack.process("algorithm").pid if address == self.first_address else self.second.process.pid

    async def kill(self, address: str) -> None:
        """Kills a service with signal 9."""
        if address == self.first_address:
            await self.stack.kill_service("algorithm")
        else:
            self.second.process.kill()


@asynccontextmanager
async def pair(folder: Path, *, storage: str) -> AsyncIterator[Pair]:
    settings = {"FULMEN_ALGORITHM_RUN_STORAGE": storage, "FULMEN_ALGORITHM_RUN_LEASE_S": str(LEASE_S)}
    async with (
        running_stack(folder, environment=settings) as stack,
        second_service(stack, folder / "second") as second,
        connect(stack_targets(stack), token=stack.client_token) as first_client,
        client_of(stack, second) as second_client,
    ):
        yield Pair(
            stack=stack,
            second=second,
            first_client=first_client,
            second_client=second_client,
            runs=Path(storage) / "runs",
        )


@pytest.mark.long
async def test_a_run_whose_service_is_killed_ends_on_the_other_and_uses_every_group_once(
    short_tmp_path, repository_root
):
    async with pair(short_tmp_path, storage=str(short_tmp_path / "shared")) as both:
        inputs = await publish_training_inputs(both.first_client, repository_root)
        name = await create_run(both.first_client, "taken", inputs, LONG)
        # Whoever is asked answers; a watch of the other service is forwarded to the owner.
        await Watcher(both.stack, both.second_client, name).until_step(3)
        owner = await both.owner(name) or both.second.address
        survivor, client = both.other_than(owner)
        watcher = Watcher(both.stack, client, name)
        await both.kill(owner)
        started = time.monotonic()
        request = service_pb.GetTrainingRunRequest(name=name)

        async def taken() -> bool:
            run = (await client.training_runs.GetTrainingRun(request)).training_run
            assert run.state in {PENDING, RUNNING}, "the run ended before it was disturbed"
            return run.owner_address == survivor

        await eventually(taken, what="the survivor takes the run over", deadline_s=TAKEOVER_LIMIT_S)
        print(f"taken over after {time.monotonic() - started:.1f} s")
        done = await watcher.end()
        assert done.state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
        check_books(read_consumed(both.runs / "default/taken"), await finished_groups(client, name), steps=LONG_STEPS)
        assert any(text.startswith("Resuming from the checkpoint") for text in watcher.notices()), watcher.story()


@pytest.mark.long
async def test_a_stopped_service_that_comes_back_is_fenced(short_tmp_path, repository_root):
    async with pair(short_tmp_path, storage=str(short_tmp_path / "shared")) as both:
        inputs = await publish_training_inputs(both.first_client, repository_root)
        # On the service without a supervisor, which would restart it because it hangs.
        name = await create_run(both.second_client, "stopped", inputs, LONG)
        await Watcher(both.stack, both.second_client, name).until_step(3)
        owner = both.second.address
        assert await both.owner(name) != both.first_address
        other, client = both.other_than(owner)
        watcher = Watcher(both.stack, client, name)
        first_epoch = RunFiles(both.runs / "default/stopped").epoch
        os.kill(both.pid(owner), signal.SIGSTOP)
        try:
            request = service_pb.GetTrainingRunRequest(name=name)

            async def taken() -> bool:
                run = (await client.training_runs.GetTrainingRun(request)).training_run
                assert run.state in {PENDING, RUNNING}, "the run ended before it was disturbed"
                return run.owner_address == other

            async def newer() -> RunFiles | None:
                files = RunFiles(both.runs / "default/stopped")
                return files if files.epoch > first_epoch else None

            await eventually(taken, what="the other takes the run over", deadline_s=TAKEOVER_LIMIT_S)
            # The lease is taken first, the files follow.
            files = await eventually(newer, what="the run's files are of the new owner's epoch")
            epoch_before = files.epoch
            late = both.runs / "default/stopped" / f"journal-{epoch_before - 1:08d}"
            seen = {path.name: path.read_bytes() for path in files.journal.iterdir()}
            assert seen
        finally:
            os.kill(both.pid(owner), signal.SIGCONT)
        done = await watcher.end()
        assert done.state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
        check_books(read_consumed(both.runs / "default/stopped"), await finished_groups(client, name), steps=LONG_STEPS)
        assert RunFiles(both.runs / "default/stopped").epoch == epoch_before
        assert late.exists()
        assert done.policy_version == await newest_version(client)
        # The former owner answers for the run again, from what the new one wrote.
        _, former = both.other_than(other)
        again = (await former.training_runs.GetTrainingRun(request)).training_run
        assert (again.state, again.step) == (pb.TRAINING_RUN_STATE_SUCCEEDED, LONG_STEPS)


async def newest_version(client: Services) -> str:
    request = resource_service_pb2.GetResourcesRequest(names=["resources/policy.tiny"])
    return (await client.resources.GetResources(request)).resources[0].name
