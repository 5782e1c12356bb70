"""Says what is wrong with the books of a training run: what was lost, what counted twice, what was scored wrongly.

Knows the contracts and the lineage file `consumed.jsonl`, and nothing of how any service works.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulmen.errors import Unavailable
from fulmen.rpc.services import Services
from fulmen.store.v1 import attempt_pb2, failure_pb2, rollout_pb2, rollout_service_pb2, span_service_pb2
from fulmen.trajectories import Trajectory, trajectories
from tests.support.algorithm.runs import FINAL_ROLLOUT_STATES, eventually, list_rollouts

__all__ = ["Books", "collect_books", "failure_counts", "problems_of"]

INFRASTRUCTURE = frozenset(
    {
        failure_pb2.FAILURE_KIND_LEASE_LOST,
        failure_pb2.FAILURE_KIND_RUNNER_LOST,
        failure_pb2.FAILURE_KIND_INFRA,
        failure_pb2.FAILURE_KIND_RELEASED,
    }
)
TRAIN_PREFIX = "train/"
SPAN_BATCH = 512
FEED_LIMIT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Everything that can be known about a run from outside, after its end.

    Attributes:
        rollouts: as the store lists them, with their attempts.
        feed: group ids and the names of their members, in the order of the completion feed from its beginning.
        consumed: the lines of `consumed.jsonl`.
        calls: captured model calls of the deciding attempt, by rollout.
        rows: training rows that those calls merge into, by rollout.
    """

    rollouts: Sequence[rollout_pb2.Rollout]
    feed: Sequence[tuple[str, tuple[str, ...]]]
    consumed: Sequence[Mapping[str, Any]]
    calls: Mapping[str, int]
    rows: Mapping[str, int]


async def collect_books(client: Services, run: str, state_dir: Path) -> Books:
    """Reads the books of a run that has ended, once all its rollouts have.

    Args:
        client: the services.
        run: `projects/{project}/trainingRuns/{id}`.
        state_dir: folder of the stack.
    """

    async def all_final() -> list[rollout_pb2.Rollout] | None:
        listed = await list_rollouts(client, training_run=run)
        return listed if listed and all(each.state in FINAL_ROLLOUT_STATES for each in listed) else None

    listed = await eventually(all_final, what=f"every rollout of {run} is final")
    rollouts = [await _read(client, each.name) for each in listed]
    merged = await _read_trajectories(client, rollouts)
    journals = (state_dir / "algorithm" / "runs/default" / run.rpartition("/")[2]).glob("journal-*")
    lines = max(journals) / "consumed.jsonl"
    return Books(
        rollouts=rollouts,
        feed=await _read_feed(client, run, count=len(rollouts)),
        consumed=[json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()],
        calls={name: sum(row.call_count for row in each.rows) for name, each in merged.items()},
        rows={name: len(each.rows) for name, each in merged.items()},
    )


def failure_counts(books: Books) -> Counter[str]:
    """Counts the failed attempts of a run by kind."""
    return Counter(
        failure_pb2.FailureKind.Name(attempt.failure_kind).removeprefix("FAILURE_KIND_")
        for rollout in books.rollouts
        for attempt in rollout.attempts
        if attempt.state == attempt_pb2.ATTEMPT_STATE_FAILED
    )


def problems_of(books: Books, *, calls_per_rollout: int, min_reward: float) -> list[str]:
    """Returns everything that contradicts the promises; empty if all is well.

    Args:
        books: of a run whose agent makes no mistakes of its own.
        calls_per_rollout: how many model calls the agent makes.
        min_reward: what the grader gives at least; a lower reward was made up.
    """
    found: list[str] = []
    for rollout in books.rollouts:
        found += _rollout_problems(rollout, min_reward)
    found += _feed_problems(books)
    found += _lineage_problems(books)
    found += _capture_problems(books, calls_per_rollout)
    return found


def _rollout_problems(rollout: rollout_pb2.Rollout, min_reward: float) -> list[str]:
    found = []
    state = rollout_pb2.RolloutState.Name(rollout.state)
    if rollout.state not in FINAL_ROLLOUT_STATES:
        found.append(f"is {state}")
    expected = [f"{rollout.name}/attempts/{number}" for number in range(1, len(rollout.attempts) + 1)]
    if [attempt.name for attempt in rollout.attempts] != expected:
        found.append(f"its attempts are not dense: {[attempt.name for attempt in rollout.attempts]}")
    deciding = [attempt for attempt in rollout.attempts if attempt.final]
    cancelled = rollout.state == rollout_pb2.ROLLOUT_STATE_CANCELLED
    if len(deciding) > 1 or not (deciding or cancelled) or (deciding and deciding[0] != rollout.attempts[-1]):
        found.append(f"{len(deciding)} of {len(rollout.attempts)} attempts are final")
    if rollout.state == rollout_pb2.ROLLOUT_STATE_FAILED:
        found.append(f"failed: {failure_pb2.FailureKind.Name(rollout.failure_kind)}")
    for attempt in rollout.attempts:
        found += _attempt_problems(rollout, attempt, min_reward)
    return [f"{rollout.name}: {each}" for each in found]


def _attempt_problems(rollout: rollout_pb2.Rollout, attempt: attempt_pb2.Attempt, min_reward: float) -> list[str]:
    rewards = [reward.value for reward in attempt.rewards]
    if attempt.state == attempt_pb2.ATTEMPT_STATE_SUCCEEDED:
        if rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED and attempt.final:
            if len(rewards) == 1 and rewards[0] >= min_reward:
                return []
            return [f"the rewards of its deciding attempt are {rewards}"]
        return [f"attempt {attempt.name} succeeded but does not decide"]
    if attempt.state != attempt_pb2.ATTEMPT_STATE_FAILED:
        return [f"attempt {attempt.name} is {attempt_pb2.AttemptState.Name(attempt.state)}"]
    found = []
    kind = attempt.failure_kind
    was_cancelled = rollout.state == rollout_pb2.ROLLOUT_STATE_CANCELLED and attempt.final
    if kind not in INFRASTRUCTURE and not (was_cancelled and kind == failure_pb2.FAILURE_KIND_CANCELLED):
        name = failure_pb2.FailureKind.Name(kind)
        found.append(f"attempt {attempt.name} ended as {name}: {attempt.failure_message}")
    if rewards:
        found.append(f"the failed attempt {attempt.name} was scored {rewards}")
    return found


def _feed_problems(books: Books) -> list[str]:
    found = [f"the feed has {group} {count} times" for group, count in _repeated(group for group, _ in books.feed)]
    members = {group: set(names) for group, names in books.feed}
    listed: dict[str, set[str]] = {}
    sizes: dict[str, int] = {}
    for rollout in books.rollouts:
        listed.setdefault(rollout.group_id, set()).add(rollout.name)
        sizes[rollout.group_id] = rollout.group_size
    for group, names in listed.items():
        if members.get(group) != names:
            found.append(f"{group} has {sorted(names)} in the list and {sorted(members.get(group, ()))} in the feed")
        if len(names) != sizes[group]:
            found.append(f"{group} has {len(names)} of {sizes[group]} rollouts")
    found += [f"{group} is in the feed, but its rollouts are not listed" for group in members.keys() - listed.keys()]
    indices = sorted(int(group.removeprefix(TRAIN_PREFIX)) for group in listed if group.startswith(TRAIN_PREFIX))
    if indices != list(range(len(indices))):
        found.append(f"the indices of the training groups have gaps: {indices}")
    return found


def _lineage_problems(books: Books) -> list[str]:
    found = []
    order = [group for group, _ in books.feed if group.startswith(TRAIN_PREFIX)]
    consumed = [f"{TRAIN_PREFIX}{line['group']}" for line in books.consumed]
    if consumed != order[: len(consumed)]:
        found.append(f"what was consumed is not the beginning of the feed: {consumed} of {order}")
    names = [name for line in books.consumed for name in line["rollouts"]]
    found += [f"{name} was consumed {count} times" for name, count in _repeated(names)]
    trained = [name for line in books.consumed for name in line["trained"]]
    found += [f"{name} was trained on {count} times" for name, count in _repeated(trained)]
    steps = [line["step"] for line in books.consumed]
    if sorted(set(steps)) != list(range(1, len(set(steps)) + 1)) or steps != sorted(steps):
        found.append(f"the steps of the lineage are not in order: {steps}")
    states = {rollout.name: rollout.state for rollout in books.rollouts}
    members = dict(books.feed)
    for line in books.consumed:
        group = f"{TRAIN_PREFIX}{line['group']}"
        if set(line["rollouts"]) != set(members.get(group, ())) or not set(line["trained"]) <= set(line["rollouts"]):
            found.append(f"the lineage names other rollouts of {group} than the feed")
        for name in line["trained"]:
            if states.get(name) != rollout_pb2.ROLLOUT_STATE_SUCCEEDED:
                found.append(f"{name} was trained on although it did not succeed")
    return found


def _capture_problems(books: Books, calls_per_rollout: int) -> list[str]:
    return [
        f"{rollout.name}: {books.calls.get(rollout.name, 0)} of {calls_per_rollout} model calls were captured"
        for rollout in books.rollouts
        if rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
        and books.calls.get(rollout.name, 0) != calls_per_rollout
    ]


def _repeated(items: Iterable[str]) -> list[tuple[str, int]]:
    return [(item, count) for item, count in Counter(items).items() if count > 1]


async def _read(client: Services, name: str) -> rollout_pb2.Rollout:
    answer = await client.rollouts.GetRollout(rollout_service_pb2.GetRolloutRequest(name=name))
    return answer.rollout


async def _read_feed(client: Services, run: str, *, count: int) -> list[tuple[str, tuple[str, ...]]]:
    """Reads the feed of a run from its beginning until it has named so many rollouts."""
    feed: list[tuple[str, tuple[str, ...]]] = []
    cursor = ""
    async with asyncio.timeout(FEED_LIMIT_S):
        while sum(len(names) for _, names in feed) < count:
            request = rollout_service_pb2.WatchRolloutsRequest(training_run=run, cursor=cursor)
            stream = client.rollouts.WatchRollouts(request)
            try:
                async for message in stream:
                    feed += [(group.group_id, tuple(each.name for each in group.rollouts)) for group in message.groups]
                    cursor = message.cursor or cursor
                    if sum(len(names) for _, names in feed) >= count:
                        break
            except Unavailable:
                continue
            finally:
                stream.cancel()
    return feed


async def _read_trajectories(client: Services, rollouts: Sequence[rollout_pb2.Rollout]) -> dict[str, Trajectory]:
    """Reads the usable captured calls of every deciding attempt that succeeded, by rollout."""
    attempts = {
        rollout.attempts[-1].name: rollout.name
        for rollout in rollouts
        if rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED
    }
    chunks = []
    names = list(attempts)
    for start in range(0, len(names), SPAN_BATCH):
        request = span_service_pb2.StreamSpansRequest(parents=names[start : start + SPAN_BATCH])
        async for message in client.spans.StreamSpans(request, timeout=FEED_LIMIT_S):
            chunks += message.chunks
    return {attempts[name]: found for name, found in trajectories(chunks).items() if name in attempts}
