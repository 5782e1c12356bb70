"""Follows training runs, finished groups, changes of rollouts and queues, across restarts of the services and broken
connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.errors import DeadlineExceeded, MessageTooLarge, Unavailable
from fulmen.rpc.services import Services
from fulmen.store.v1 import queue_service_pb2, rollout_changes_pb2, rollout_service_pb2

__all__ = ["FINAL_STATES", "follow_changes", "follow_groups", "follow_queue", "follow_run", "read_steps"]

FINAL_STATES: Final = frozenset(
    {
        training_run_pb2.TRAINING_RUN_STATE_SUCCEEDED,
        training_run_pb2.TRAINING_RUN_STATE_FAILED,
        training_run_pb2.TRAINING_RUN_STATE_CANCELLED,
    }
)
PATIENCE_S: Final = 180.0
IDLE_LIMIT_S: Final = 30.0
REOPEN_WAIT_S: Final = 0.5
STEPS_LIMIT_S: Final = 10.0
# The store sends a keep-alive every 15 s.
SILENCE_LIMIT_S: Final = 45.0
MAX_GROUP_BYTES: Final = 256 * 1024 * 1024


async def follow_run(
    client: Services, name: str, *, on_interruption: Callable[[str], None]
) -> AsyncGenerator[training_run_pb2.TrainingRunEvent]:
    """Yields every event of a run once, in order, and ends when no event can follow the one with its final state.

    For a run that was rolled back after it had ended, the events before and after the rollback are yielded.

    A silent or broken stream is opened again after the last event.

    Args:
        client: the services.
        name: `projects/{project}/trainingRuns/{id}`.
        on_interruption: Called when the service is unreachable.

    Raises:
        Unavailable: if the service cannot be reached for 3 minutes.
        FulmenError: if the service refuses.
    """
    sequence, ended = 0, False
    reached = time.monotonic()
    while True:
        request = training_run_service_pb2.WatchTrainingRunRequest(name=name, after_sequence=sequence)
        stream = client.training_runs.WatchTrainingRun(request)
        try:
            while True:
                try:
                    async with asyncio.timeout(IDLE_LIMIT_S):
                        answer = await anext(stream, None)
                except TimeoutError:
                    await _check_alive(client, name)
                    reached = time.monotonic()
                    break
                if answer is None and ended:
                    return
                if answer is None:
                    break
                reached = time.monotonic()
                sequence = answer.event.sequence
                yield answer.event
                if answer.event.HasField("run"):
                    ended = answer.event.run.state in FINAL_STATES
        except DeadlineExceeded:
            reached = time.monotonic()  # The reader was slow; the service was there.
        except Unavailable as error:
            if time.monotonic() - reached > PATIENCE_S:
                raise Unavailable(
                    f"The algorithm service was unreachable for {PATIENCE_S:.0f} s ({error.message}). The run continues "
                    f"when the service is back: `fulmen run watch {name.rpartition('/')[2]}`."
                ) from None
            on_interruption("The algorithm service does not answer; trying again…")
            await asyncio.sleep(REOPEN_WAIT_S)
        finally:
            stream.cancel()


async def _check_alive(client: Services, name: str) -> None:
    """Reads the run, to distinguish a silent service from a slow run."""
    await client.training_runs.GetTrainingRun(training_run_service_pb2.GetTrainingRunRequest(name=name))


async def read_steps(client: Services, run: training_run_pb2.TrainingRun) -> list[training_run_pb2.StepMetrics]:
    """Reads the run's events up to its current state, and does not wait for more.

    For a repeated step the last metrics count; steps undone by a rollback do not count until they are repeated.
    """
    steps: dict[int, training_run_pb2.StepMetrics] = {}
    branch = 0
    stream = client.training_runs.WatchTrainingRun(training_run_service_pb2.WatchTrainingRunRequest(name=run.name))
    try:
        async with asyncio.timeout(STEPS_LIMIT_S) as limit:
            async for answer in stream:
                limit.reschedule(asyncio.get_running_loop().time() + STEPS_LIMIT_S)
                event = answer.event
                if event.HasField("run") and event.run.rollback_count > branch:
                    branch = event.run.rollback_count
                    steps = {step: metrics for step, metrics in steps.items() if step <= event.run.step}
                if event.HasField("step"):
                    number = event.step.step
                    steps.setdefault(number, training_run_pb2.StepMetrics(step=number)).MergeFrom(event.step)
                if branch >= run.rollback_count and _reached(event, run):
                    break
    except TimeoutError:
        pass  # It has not come to its first step.
    finally:
        stream.cancel()
    return [metrics for _, metrics in sorted(steps.items())]


def _reached(event: training_run_pb2.TrainingRunEvent, run: training_run_pb2.TrainingRun) -> bool:
    """Returns whether an event of the run's last branch shows the run's state as it was read."""
    if run.state in FINAL_STATES:
        return event.HasField("run") and event.run.state in FINAL_STATES
    if event.HasField("run"):
        return event.run.rollback_count > 0 and event.run.step >= run.step
    return event.HasField("step") and event.step.step >= run.step


async def follow_groups(
    client: Services, request: rollout_service_pb2.WatchRolloutsRequest
) -> AsyncIterator[rollout_service_pb2.FinishedGroup]:
    """Yields every finished group that a request selects, complete, once and in order, endlessly.

    A silent or broken stream is opened again after the last group.

    Raises:
        MessageTooLarge: if a group has more than 256 MiB; `metadata` has its `group_id`, and the `cursor` after it.
        Unavailable: if the store cannot be reached for 3 minutes.
        FulmenError: if the store refuses.
    """
    resumed = rollout_service_pb2.WatchRolloutsRequest()
    resumed.CopyFrom(request)
    parts = _Parts()
    async with aclosing(_answers(client.rollouts.WatchRollouts, resumed)) as answers:
        async for answer in answers:
            if answer is None:
                parts = _Parts()
                continue
            for part in answer.groups:
                group = parts.add(part)
                if group is not None:
                    resumed.cursor = group.cursor
                    yield group
            resumed.cursor = answer.cursor or resumed.cursor


async def follow_changes(
    client: Services, request: rollout_changes_pb2.WatchRolloutChangesRequest
) -> AsyncIterator[rollout_changes_pb2.WatchRolloutChangesResponse]:
    """Yields the changed rollouts that a request selects, endlessly: first an empty message, then messages with
    rollouts.

    A silent or broken stream is opened again after the last message.

    Raises:
        Unavailable: if the store cannot be reached for 3 minutes.
        FulmenError: if the store refuses.
    """
    resumed = rollout_changes_pb2.WatchRolloutChangesRequest()
    resumed.CopyFrom(request)
    has_begun = False
    async with aclosing(_answers(client.rollouts.WatchRolloutChanges, resumed)) as answers:
        async for answer in answers:
            if answer is None:
                continue
            if answer.rollouts or not has_begun:
                has_begun = True
                yield answer
            resumed.cursor = answer.cursor


async def follow_queue(
    client: Services, request: queue_service_pb2.WatchQueueStatsRequest
) -> AsyncIterator[queue_service_pb2.WatchQueueStatsResponse]:
    """Yields the statistics of a queue when they change, and at least every 15 s, endlessly.

    A silent or broken stream is opened again.

    Raises:
        Unavailable: if the store cannot be reached for 3 minutes.
        FulmenError: if the store refuses.
    """
    async with aclosing(_answers(client.queues.WatchQueueStats, request)) as answers:
        async for answer in answers:
            if answer is not None:
                yield answer


async def _answers(open_stream: Callable[[Any], Any], request: Any) -> AsyncGenerator[Any, None]:
    """Yields the answers of a stream endlessly, and None each time that it was opened, with the current request.

    Raises:
        Unavailable: if the store cannot be reached for 3 minutes.
        FulmenError: if the store refuses.
    """
    reached = time.monotonic()
    while True:
        stream = open_stream(request)
        yield None
        try:
            while True:
                async with asyncio.timeout(SILENCE_LIMIT_S):
                    answer = await anext(stream, None)
                if answer is None:
                    break
                reached = time.monotonic()
                yield answer
        except DeadlineExceeded:
            reached = time.monotonic()  # The reader was slow; the store was there.
        except (Unavailable, TimeoutError):
            if time.monotonic() - reached > PATIENCE_S:
                cursor = getattr(request, "cursor", "")
                resume = f"; resume with cursor {cursor}" if cursor else ""
                raise Unavailable(f"The store was unreachable for {PATIENCE_S:.0f} s{resume}.") from None
            await asyncio.sleep(REOPEN_WAIT_S)
        finally:
            stream.cancel()


class _Parts:
    """Joins the parts in which large groups are sent."""

    def __init__(self) -> None:
        self._group: rollout_service_pb2.FinishedGroup | None = None
        self._size_bytes = 0

    def add(self, part: rollout_service_pb2.FinishedGroup) -> rollout_service_pb2.FinishedGroup | None:
        """Returns the group that a part completes; None if more of it follows.

        Raises:
            MessageTooLarge: if the part ends a group that is too large.
        """
        group = self._group
        if group is None:
            if part.cursor:
                return part
            group = self._group = part
        elif self._size_bytes <= MAX_GROUP_BYTES:
            group.rollouts.extend(part.rollouts)
        self._size_bytes += part.ByteSize()
        if not part.cursor:
            return None
        size_bytes, self._group, self._size_bytes = self._size_bytes, None, 0
        if size_bytes > MAX_GROUP_BYTES:
            raise MessageTooLarge(
                f"The group {part.group_id} is larger than {MAX_GROUP_BYTES >> 20} MiB. Continue after it with its cursor.",
                group_id=part.group_id, cursor=part.cursor, size_bytes=size_bytes,
            )  # fmt: skip
        group.cursor = part.cursor
        return group
