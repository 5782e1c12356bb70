"""Follows a training run to its end, over restarts of the service and broken connections."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.client import Client
from fulmen.errors import Unavailable
from fulmen_cli.exits import CommandFailed
from fulmen_cli.run.states import short_name

__all__ = ["FINAL_STATES", "follow_run"]

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


async def follow_run(
    client: Client, name: str, *, on_interruption: Callable[[str], None]
) -> AsyncIterator[training_run_pb2.TrainingRunEvent]:
    """Yields every event of a run once, in order, and ends when no event can follow the one with its final state.

    Of a run that was rolled back after it had ended, the events before and after it are yielded.

    A silent or broken stream is opened again after the last event.

    Args:
        client: the services.
        name: `projects/{project}/trainingRuns/{id}`.
        on_interruption: Called when the service is unreachable.

    Raises:
        CommandFailed: if the service cannot be reached for 3 minutes.
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
        except Unavailable as error:
            if time.monotonic() - reached > PATIENCE_S:
                raise CommandFailed(
                    f"The algorithm service was unreachable for {PATIENCE_S:.0f} s ({error.message}). The run continues when it is back: `fulmen run watch {short_name(name)}`."
                ) from None
            on_interruption("The algorithm service does not answer; trying again…")
            await asyncio.sleep(REOPEN_WAIT_S)
        finally:
            stream.cancel()


async def _check_alive(client: Client, name: str) -> None:
    """Reads the run, to distinguish a silent service from a slow run."""
    await client.training_runs.GetTrainingRun(training_run_service_pb2.GetTrainingRunRequest(name=name))
