"""Says what the store broke of its promises, given what it acknowledged and what it shows afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fulmen.store.v1 import attempt_pb2, failure_pb2, rollout_pb2
from tests.support.store.load import Ledger

__all__ = ["Shown", "store_problems"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What can be read from the store in the end.

    Attributes:
        feeds: group ids as each reader got them, over all its breaks; the last is read in one go from the beginning.
        rollouts: those of the last feed, with their attempts.
        spans: ids of the stored spans by attempt, as often as they are stored.
    """

    feeds: Sequence[Sequence[str]]
    rollouts: Mapping[str, rollout_pb2.Rollout]
    spans: Mapping[str, Sequence[bytes]]


def store_problems(ledger: Ledger, shown: Shown) -> list[str]:
    """Returns every broken promise; empty if all is well."""
    names = {name for members in ledger.created.values() for name in members}
    found = [f"{name} was acknowledged and is lost" for name in sorted(names - shown.rollouts.keys())]
    found += [f"{name} was never asked for" for name in sorted(shown.rollouts.keys() - names)]
    found += _feed_problems(ledger, shown)
    for rollout in shown.rollouts.values():
        found += _rollout_problems(
            rollout, may_be_cancelled=rollout.name in ledger.cancels, may_be_dead=ledger.runners_die
        )
    found += _completion_problems(ledger, shown)
    found += _span_problems(ledger, shown)
    return found


def _feed_problems(ledger: Ledger, shown: Shown) -> Iterable[str]:
    whole = list(shown.feeds[-1])
    for number, feed in enumerate(shown.feeds):
        for group, count in Counter(feed).items():
            if count > 1:
                yield f"reader {number} got {group} {count} times"
        missing = ledger.created.keys() - set(feed)
        yield from (f"reader {number} never got {group}" for group in sorted(missing))
        if list(feed) != whole and not missing and len(set(feed)) == len(feed):
            yield f"reader {number} got the groups in another order"


def _rollout_problems(rollout: rollout_pb2.Rollout, *, may_be_cancelled: bool, may_be_dead: bool) -> Iterable[str]:
    cancelled = may_be_cancelled and rollout.state == rollout_pb2.ROLLOUT_STATE_CANCELLED
    kinds = [failure_pb2.FailureKind.Name(each.failure_kind) for each in rollout.attempts]
    dead = may_be_dead and kinds[-1:] == ["FAILURE_KIND_RUNNER_LOST"] and "FAILURE_KIND_LEASE_LOST" in kinds
    if rollout.state != rollout_pb2.ROLLOUT_STATE_SUCCEEDED and not cancelled and not dead:
        yield f"{rollout.name} is {rollout_pb2.RolloutState.Name(rollout.state)}"
    expected = [f"{rollout.name}/attempts/{number}" for number in range(1, len(rollout.attempts) + 1)]
    if [attempt.name for attempt in rollout.attempts] != expected:
        yield f"{rollout.name} has attempts that are not dense: {[attempt.name for attempt in rollout.attempts]}"
    good = [each.name for each in rollout.attempts if each.state == attempt_pb2.ATTEMPT_STATE_SUCCEEDED]
    final = [each.name for each in rollout.attempts if each.final]
    # A rollout that was cancelled while it waited has no deciding attempt.
    decided = len(final) == 1 and final[0] == expected[-1] and (good == final or ((cancelled or dead) and not good))
    if not decided and not (cancelled and not final and not good):
        yield f"{rollout.name}: attempts {final} are final, {good} succeeded, of {len(expected)}"


def _completion_problems(ledger: Ledger, shown: Shown) -> Iterable[str]:
    final = {each.name for rollout in shown.rollouts.values() for each in rollout.attempts if each.final}
    yield from (f"the acknowledged end of {attempt} is lost" for attempt in sorted(ledger.ended - final))
    for attempt, count in ledger.applied.items():
        if count > 1:
            yield f"{attempt} was ended {count} times"


def _span_problems(ledger: Ledger, shown: Shown) -> Iterable[str]:
    for attempt, ids in ledger.spans.items():
        stored = Counter(shown.spans.get(attempt, ()))
        yield from (f"a span of {attempt} was acknowledged and is lost" for _ in ids - stored.keys())
        yield from (f"a span of {attempt} is stored {count} times" for count in stored.values() if count > 1)
