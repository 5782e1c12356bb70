"""Whether, when and where a call is tried again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MAX_RETRY_AFTER_S = 30.0
_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Back-off that grows by two up to a cap, with jitter, within a total deadline.

    Attributes:
        deadline_s: seconds after the first try in which a further try may begin; 0 never retries.
        first_delay_s: mean of the first wait, in seconds.
        max_delay_s: cap of the mean wait, in seconds.
    """

    deadline_s: float
    first_delay_s: float = 0.05
    max_delay_s: float = 1.0

    def delays(self, random: Callable[[], float]) -> Iterator[float]:
        """Yields the waits in seconds, without end; each is its mean times 0.5 to 1.5.

        The jitter keeps the agents that lost the same backend from coming back all at once.
        """
        mean = self.first_delay_s
        while True:
            yield mean * (0.5 + random())
            mean = min(self.max_delay_s, mean * 2)


@dataclass(slots=True, eq=False)
class RetryBudget:
    """Bounds what is sent to one backend a second time: a share of its calls, and a few per second.

    A call that finds nothing left waits on, rather than fail, until its deadline. When the backend has recovered, all
    that wait are let go.

    Attributes:
        share: of the calls that a backend was sent, so many may be further ones.
        floor_per_s: this many per second are always left, so that somebody finds out when the backend is back.
        waiting: calls that wait to be tried again there.
    """

    clock: Callable[[], float]
    share: float = 0.2
    floor_per_s: float = 10.0
    most: float = 100.0
    waiting: int = 0
    _left: float = 10.0
    _seen_calls: int = 0
    _seen_s: float = field(default=-1.0)

    def take(self, calls: int) -> bool:
        """Takes one further call out of the budget, if it has one left.

        Args:
            calls: how many calls the backend was ever sent.
        """
        now_s = self.clock()
        if self._seen_s >= 0:
            self._left += (now_s - self._seen_s) * self.floor_per_s
        self._left += (calls - self._seen_calls) * self.share
        # What recovery left for those who wait may be more than the cap; it is not added to.
        self._left = min(self._left, max(self.most, float(self.waiting)))
        self._seen_s, self._seen_calls = now_s, calls
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def release(self) -> None:
        """Lets all go that wait: the backend is back."""
        self._left = max(self._left, float(self.waiting))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """One try that did not succeed, as far as the next one depends on it.

    Attributes:
        backend_id: where it went.
        replicas: ids of the backends of the variant that it went to.
        at_once: the backend never saw the call: another replica may get it without a wait.
        again: the same backend may do better later.
        retry_after_s: how long the backend asked to be left alone.
    """

    backend_id: str
    replicas: Sequence[str]
    at_once: bool = False
    again: bool = True
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next try.

    Attributes:
        route: index among the call's routes: its own is 0, its fallbacks follow.
        avoid: backends to pass over if there are others.
        wait_s: how long to wait before.
    """

    route: int
    avoid: frozenset[str] = frozenset()
    wait_s: float = 0.0


class Recovery:
    """Plans the tries of one call after the first has failed.

    First every replica of the variant, then every fallback in turn, then a wait and all of it again, until the policy's
    deadline.
    """

    def __init__(self, *, routes: int, policy: RetryPolicy, random: Callable[[], float]) -> None:
        """Begins after a try on the first of so many routes."""
        self._routes = routes
        self._route = 0
        self._policy = policy
        self._delays = policy.delays(random)
        self._tried: set[str] = set()

    def delay_s(self) -> float:
        """Returns the next wait of the back-off, in seconds."""
        return next(self._delays)

    def after(self, failed: Failed, *, elapsed_s: float) -> Step | None:
        """Returns the next try; None if the outcome stands.

        Args:
            elapsed_s: seconds since the first failure.
        """
        if self._policy.deadline_s <= 0:
            return None
        self._tried.add(failed.backend_id)
        if any(replica not in self._tried for replica in failed.replicas):
            return self._within(0.0 if failed.at_once else self.delay_s(), elapsed_s)
        if self._route + 1 < self._routes:
            self._route += 1
            self._tried = set()
            return self._within(0.0, elapsed_s)
        if not failed.again and self._routes == 1:
            return None
        wait_s = self.delay_s()
        if len(failed.replicas) <= 1 and self._routes == 1:
            wait_s = max(wait_s, failed.retry_after_s)
        self._route = 0
        self._tried = {failed.backend_id}
        step = self._within(wait_s, elapsed_s)
        self._tried = set()
        return step

    def _within(self, wait_s: float, elapsed_s: float) -> Step | None:
        if elapsed_s + wait_s > self._policy.deadline_s:
            return None
        return Step(route=self._route, avoid=frozenset(self._tried), wait_s=wait_s)


def retry_after_s(value: str, now_s: float) -> float:
    """Reads a `Retry-After` header: seconds, or an HTTP date; 0 if it says nothing, at most 30.

    Args:
        now_s: seconds since 1970.

    Source: RFC 9110, section 10.2.3.
    """
    value = value.strip()
    if not value:
        return 0.0
    if value.isascii() and value.isdigit():
        return min(float(value[:_MAX_DIGITS]), MAX_RETRY_AFTER_S)
    try:
        when = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    left_s = (when - datetime.fromtimestamp(now_s, UTC)).total_seconds()
    return min(max(left_s, 0.0), MAX_RETRY_AFTER_S)
