"""Finds one validation task that was run before and after the training, and what the agent made of it each time."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Final

from fulmen.client import Client
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2

__all__ = ["Sample", "SamplePair", "sample_before_and_after"]

PAGE_SIZE: Final = 1000
MOST_PAGES: Final = 50
MOST_COMPARED: Final = 24
MAX_TEXT: Final = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rollout: what the agent was given, what came out, and its reward; None if it has none."""

    rollout: str
    task: str
    outcome: str
    reward: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePair:
    """The same task, before and after."""

    before: Sample
    after: Sample


async def sample_before_and_after(client: Client, training_run: str) -> SamplePair | None:
    """Picks the validation task whose reward grew most; None if nothing was validated twice.

    Raises:
        FulmenError: if the store refuses or cannot be reached.
    """
    by_task: dict[str, list[rollout_pb2.Rollout]] = {}
    for rollout in await _validation_rollouts(client, training_run):
        # A validation group is `validation/{policy version}/{task}`: the last part is the task.
        by_task.setdefault(rollout.group_id.rpartition("/")[2], []).append(rollout)
    twice = [rollouts for rollouts in by_task.values() if len(rollouts) > 1]
    pairs = await asyncio.gather(*(_pair(client, rollouts) for rollouts in twice[:MOST_COMPARED]))
    return max(pairs, key=_growth, default=None)


async def _validation_rollouts(client: Client, training_run: str) -> list[rollout_pb2.Rollout]:
    found: list[rollout_pb2.Rollout] = []
    request = rollout_service_pb2.ListRolloutsRequest(training_run=training_run, page_size=PAGE_SIZE)
    for _ in range(MOST_PAGES):
        page = await client.rollouts.ListRollouts(request)
        found += [each for each in page.rollouts if each.mode == rollout_pb2.ROLLOUT_MODE_VALIDATION]
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    return found


async def _pair(client: Client, rollouts: list[rollout_pb2.Rollout]) -> SamplePair:
    ordered = sorted(rollouts, key=lambda each: each.create_time.ToNanoseconds())
    before, after = await asyncio.gather(_sample(client, ordered[0].name), _sample(client, ordered[-1].name))
    return SamplePair(before=before, after=after)


async def _sample(client: Client, name: str) -> Sample:
    answer = await client.rollouts.GetRollout(rollout_service_pb2.GetRolloutRequest(name=name))
    rollout = answer.rollout
    attempt = rollout.attempts[-1] if rollout.attempts else None
    given = [] if attempt is None else attempt.rewards
    rewards = [each.value for each in given if not each.HasField("step") and not each.span_id]
    return Sample(
        rollout=name,
        task=_readable(rollout.input),
        outcome="" if attempt is None else _readable(attempt.output) or attempt.failure_message,
        reward=rewards[0] if rewards else None,
    )


def _growth(pair: SamplePair) -> float:
    if pair.before.reward is None or pair.after.reward is None:
        return float("-inf")
    return pair.after.reward - pair.before.reward


def _readable(content: bytes) -> str:
    text = content.decode("utf-8", errors="replace")
    try:
        value = json.loads(text)
    except ValueError:
        pass
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_TEXT else text[:MAX_TEXT] + "…"
