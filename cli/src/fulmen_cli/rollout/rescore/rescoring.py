"""Scores stored rollouts with a grader, a few concurrently.

Invariant: what is held in memory is a page of names, the rollouts that are being scored, and the scores.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fulmen.agent import FINAL_DIMENSION, RewardKey
from fulmen.rpc.services import Services
from fulmen.scores import Problem, RolloutScore, final_reward
from fulmen.store.v1 import rollout_service_pb2
from fulmen.trajectories.rewards import read_rewards
from fulmen.trajectories.stored import ROLLOUTS_AT_ONCE, StoredAttempt, read_stored, rollout_names
from fulmen_cli.output import enum_word
from fulmen_cli.rollout.rescore.partial import Compared, Partial

if TYPE_CHECKING:
    from fulmen_runner.regrade import Regrader

__all__ = ["Rescoring"]

TRAIN = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescoring:
    """Scores the rollouts that a request selects.

    Attributes:
        client: The services.
        regrader: The grader.
        partial: Where results go; rollouts that it has are not scored again.
        concurrency: How many outcomes are scored concurrently.
        on_result: Called after each result.
    """

    client: Services
    regrader: Regrader
    partial: Partial
    concurrency: int
    on_result: Callable[[Compared], None]

    async def run(self, request: rollout_service_pb2.ListRolloutsRequest, limit: int | None) -> list[Compared]:
        """Scores them; returns the results of all that are selected now, in the order of their names.

        Raises:
            FulmenError: if the store refuses or cannot be reached.
            CommandFailed: if a result cannot be kept.
        """
        try:
            return await self._run(request, limit)
        except ExceptionGroup as group:
            # The first failure cancels the others.
            raise group.exceptions[0] from None

    async def _run(self, request: rollout_service_pb2.ListRolloutsRequest, limit: int | None) -> list[Compared]:
        queue: asyncio.Queue[StoredAttempt | None] = asyncio.Queue(maxsize=self.concurrency)
        selected: set[str] = set()
        async with asyncio.TaskGroup() as group:
            for number in range(self.concurrency):
                group.create_task(self._score_all(queue), name=f"rescore-{number}")
            async for names in rollout_names(self.client, request, limit):
                selected.update(names)
                todo = [name for name in names if name not in self.partial.done]
                for start in range(0, len(todo), ROLLOUTS_AT_ONCE):
                    chunk = todo[start : start + ROLLOUTS_AT_ONCE]
                    for each in await read_stored(self.client, chunk, with_spans=self.regrader.takes_context):
                        await queue.put(each)
            for _ in range(self.concurrency):
                await queue.put(None)
        return [self.partial.done[name] for name in sorted(selected) if name in self.partial.done]

    async def _score_all(self, queue: asyncio.Queue[StoredAttempt | None]) -> None:
        while (stored := await queue.get()) is not None:
            result = await self._score(stored)
            self.partial.add(result)
            self.on_result(result)

    async def _score(self, stored: StoredAttempt) -> Compared:
        from fulmen_runner.regrade import Stored

        rollout, attempt = stored.rollout, stored.attempt
        mode = enum_word(rollout, "mode") or TRAIN
        graded = await self.regrader.grade(
            Stored(
                attempt=attempt.name,
                mode=mode,
                input=rollout.input,
                input_content_type=rollout.input_content_type,
                content=attempt.output,
                content_type=attempt.output_content_type,
                record=stored,
            )
        )
        failure = graded["failure"]
        score = RolloutScore(
            rollout=rollout.name,
            attempt=attempt.name,
            training_run=rollout.training_run,
            group=rollout.group_id,
            mode=mode,
            rewards={_key(each): each["value"] for each in graded["rewards"]},
            problem=None if failure is None else Problem(kind=failure["kind"], message=failure["message"]),
        )
        return Compared(score=score, old=old_reward(stored))


def old_reward(stored: StoredAttempt) -> float | None:
    """Returns the final reward that an attempt got when it ran."""
    rewards = read_rewards(stored.attempt.rewards)
    return final_reward({(each.dimension, each.step, each.span_id): each.value for each in rewards})


def _key(reward: dict[str, Any]) -> RewardKey:
    return reward["dimension"] or FINAL_DIMENSION, reward["step"], bytes.fromhex(reward["span_id"])
