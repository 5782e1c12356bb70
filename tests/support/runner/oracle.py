"""Says what a fleet of runners broke of its promises, given what the store shows after all of it.

The agents give every reward the number of their attempt: a reward of another attempt shows by its value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fulmen.store.v1 import attempt_pb2, failure_pb2, rollout_pb2

__all__ = ["Expected", "fleet_problems", "uncharged"]

Key = tuple[str, int | None]
_NOT_THE_AGENTS = frozenset(
    {
        failure_pb2.FAILURE_KIND_LEASE_LOST,
        failure_pb2.FAILURE_KIND_RUNNER_LOST,
        failure_pb2.FAILURE_KIND_INFRA,
        failure_pb2.FAILURE_KIND_RELEASED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an attempt that succeeds leaves in the store: names of rewards, and of spans in any order."""

    rewards: frozenset[Key]
    spans: tuple[str, ...] = ()


def fleet_problems(
    rollouts: Iterable[rollout_pb2.Rollout],
    spans: Mapping[str, Sequence[tuple[str, bytes]]],
    expected: Mapping[str, Expected],
) -> list[str]:
    """Returns every broken promise; empty if all is well.

    Args:
        rollouts: As the feed of finished rollouts had them, as often as it had them.
        spans: Names and ids of the stored spans, by attempt.
        expected: What each rollout's agent leaves, by rollout: all that were created.
    """
    shown = list(rollouts)
    counts = Counter(rollout.name for rollout in shown)
    found = [f"{name} never ended" for name in sorted(expected.keys() - counts.keys())]
    found += [f"{name} ended {count} times" for name, count in counts.items() if count > 1]
    for rollout in shown:
        each = [*_attempt_problems(rollout), *_decision_problems(rollout, spans, expected[rollout.name])]
        found += [f"{rollout.name}: {problem}" for problem in each]
    return found


def uncharged(rollout: rollout_pb2.Rollout) -> int:
    """Returns how many of its attempts were given back."""
    return sum(each.failure_kind == failure_pb2.FAILURE_KIND_RELEASED for each in rollout.attempts)


def _attempt_problems(rollout: rollout_pb2.Rollout) -> Iterator[str]:
    names = [attempt.name for attempt in rollout.attempts]
    if names != [f"{rollout.name}/attempts/{number}" for number in range(1, len(names) + 1)]:
        yield f"its attempts are not dense: {names}"
    final = [attempt.name for attempt in rollout.attempts if attempt.final]
    if final != names[-1:]:
        yield f"of {len(names)} attempts {final} are final"
    charged = len(names) - uncharged(rollout)
    most = rollout.policy.max_attempts
    if charged > most:
        yield f"{charged} attempts were charged, {most} are allowed"
    if rollout.state == rollout_pb2.ROLLOUT_STATE_FAILED and charged < most:
        yield f"failed after {charged} of {most} attempts"
    for attempt in rollout.attempts:
        if attempt.state == attempt_pb2.ATTEMPT_STATE_SUCCEEDED:
            if not attempt.final:
                yield f"{attempt.name} succeeded and does not decide"
        elif attempt.rewards:
            yield f"{attempt.name} failed and was scored"
        elif attempt.failure_kind not in _NOT_THE_AGENTS:
            kind = failure_pb2.FailureKind.Name(attempt.failure_kind)
            yield f"{attempt.name} ended as {kind}: {attempt.failure_message}"


def _decision_problems(
    rollout: rollout_pb2.Rollout, spans: Mapping[str, Sequence[tuple[str, bytes]]], expected: Expected
) -> Iterator[str]:
    if rollout.state == rollout_pb2.ROLLOUT_STATE_FAILED:
        return
    if rollout.state != rollout_pb2.ROLLOUT_STATE_SUCCEEDED or not rollout.attempts:
        yield f"is {rollout_pb2.RolloutState.Name(rollout.state)}"
        return
    number, attempt = len(rollout.attempts), rollout.attempts[-1]
    rewards = {(r.dimension, r.step if r.HasField("step") else None): r.value for r in attempt.rewards}
    if rewards.keys() != expected.rewards or len(attempt.rewards) != len(rewards):
        yield f"{attempt.name} has rewards {sorted(rewards, key=str)}"
    if set(rewards.values()) - {float(number)}:
        yield f"{attempt.name} has rewards of another attempt: {rewards}"
    stored = spans.get(attempt.name, ())
    names = Counter(name for name, _ in stored if name in expected.spans)
    if names != Counter(expected.spans):
        yield f"{attempt.name} has spans {dict(names)}"
    if len({span_id for _, span_id in stored}) != len(stored):
        yield f"{attempt.name} has a span twice"
