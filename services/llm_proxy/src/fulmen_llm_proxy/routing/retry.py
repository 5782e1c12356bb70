"""Whether, when and where a call is retried."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MAX_RETRY_AFTER_S = 30.0
PATIENCE_S = 10.0
"""How long retries keep a caller waiting that does not specify its timeout: less than clients' usual 30 s."""
_SHARE_OF_PATIENCE = 0.9  # the rest is for reporting the last try's failure
_MAX_DIGITS = 9
_NOT_IMPLEMENTED = 501


def is_retryable(status: int) -> bool:
    """Returns whether a call that was refused with this status may succeed if it is sent again, or elsewhere.

    That is every server error but 501, which would come again: services have many of their own, such as Anthropic's 529
    and Cloudflare's 520 to 524.
    """
    return status in (408, 429) or (status >= 500 and status != _NOT_IMPLEMENTED)


def may_be_its_own_fault(status: int) -> bool:
    """Returns whether the request itself may have broken the server, so that it must not be sent again and again."""
    return status == 500


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """Exponential back-off with jitter, a maximum delay and a total deadline.

    Attributes:
        deadline_s: time after the first failure within which a retry may start, seconds; 0 disables retries.
        first_delay_s: mean of the first delay, seconds.
        max_delay_s: maximum mean delay, seconds.
    """

    deadline_s: float
    first_delay_s: float = 0.05
    max_delay_s: float = 1.0

    def within(self, patience_s: float | None) -> RetryPolicy:
        """Returns the policy for a caller that waits so many seconds more; None if it does not specify it."""
        left_s = PATIENCE_S if patience_s is None else max(0.0, patience_s * _SHARE_OF_PATIENCE)
        return replace(self, deadline_s=min(self.deadline_s, left_s))

    def delays(self, random: Callable[[], float]) -> Iterator[float]:
        """Yields delays in seconds, without end; each is its mean times 0.5 to 1.5.

        The jitter spreads out the agents that lost the same backend.
        """
        mean = self.first_delay_s
        while True:
            yield mean * (0.5 + random())
            mean = min(self.max_delay_s, mean * 2)


@dataclass(slots=True, eq=False)
class RetryBudget:
    """Bounds the retries to one backend: a share of its calls, and a few per second.

    A call that finds no budget keeps waiting until its deadline. When the backend recovers, all waiting calls are
    released.

    Attributes:
        share: retries allowed per call sent to the backend.
        floor_per_s: retries per second that are always allowed, so that a recovery is noticed.
        max_tokens: maximum number of retries saved up.
        waiting: calls waiting for the budget.
    """

    clock: Callable[[], float]
    share: float = 0.2
    floor_per_s: float = 10.0
    max_tokens: float = 100.0
    waiting: int = 0
    _left: float = 10.0
    _seen_calls: int = 0
    _seen_s: float = field(default=-1.0)

    def take(self, calls: int) -> bool:
        """Takes one retry from the budget if one is left.

        Args:
            calls: total number of calls sent to the backend.
        """
        now_s = self.clock()
        if self._seen_s >= 0:
            self._left += (now_s - self._seen_s) * self.floor_per_s
        self._left += (calls - self._seen_calls) * self.share
        # The budget left by a recovery may exceed the maximum; it does not grow further.
        self._left = min(self._left, max(self.max_tokens, float(self.waiting)))
        self._seen_s, self._seen_calls = now_s, calls
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def release(self) -> None:
        """Releases all waiting calls after a recovery."""
        self._left = max(self._left, float(self.waiting))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A failed try, as far as the next one depends on it.

    Attributes:
        backend_id: backend of the try.
        replicas: ids of all backends of its variant.
        at_once: whether the backend never received the call, so that another replica may be tried without a delay.
        again: whether the same backend may succeed later.
        own_fault: whether the call itself may be the cause: every backend is then asked once more and no further.
        retry_after_s: delay that the backend requested, seconds.
    """

    backend_id: str
    replicas: Sequence[str]
    at_once: bool = False
    again: bool = True
    own_fault: bool = False
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTry:
    """The next try.

    Attributes:
        route: index of the route: 0 is the call's own, the fallbacks follow.
        avoid: ids of backends to skip while others are left.
        wait_s: delay before it, seconds.
    """

    route: int
    avoid: frozenset[str] = frozenset()
    wait_s: float = 0.0


class Recovery:
    """Schedules the tries of a call after the first has failed.

    First every replica of the variant, then every fallback route, then a back-off and all of it again, until the
    policy's deadline.
    """

    def __init__(self, *, routes: int, policy: RetryPolicy, random: Callable[[], float]) -> None:
        """Starts after a failed try on the first of `routes` routes."""
        self._routes = routes
        self._route = 0
        self.policy = policy
        self._rounds = 1
        self._delays = policy.delays(random)
        self._tried: set[str] = set()

    def delay_s(self) -> float:
        """Returns the next delay of the back-off, seconds."""
        return next(self._delays)

    def after(self, failed: Failed, *, elapsed_s: float) -> NextTry | None:
        """Returns the next try, or None.

        Args:
            elapsed_s: seconds since the first failure.
        """
        if self.policy.deadline_s <= 0:
            return None
        self._tried.add(failed.backend_id)
        if any(replica not in self._tried for replica in failed.replicas):
            return self._within(0.0 if failed.at_once else self.delay_s(), elapsed_s)
        if self._route + 1 < self._routes:
            self._route += 1
            self._tried = set()
            return self._within(0.0, elapsed_s)
        if (not failed.again and self._routes == 1) or (failed.own_fault and self._rounds > 1):
            return None
        self._rounds += 1
        wait_s = self.delay_s()
        if len(failed.replicas) <= 1 and self._routes == 1:
            wait_s = max(wait_s, failed.retry_after_s)
        self._route = 0
        self._tried = {failed.backend_id}
        next_try = self._within(wait_s, elapsed_s)
        self._tried = set()
        return next_try

    def _within(self, wait_s: float, elapsed_s: float) -> NextTry | None:
        if elapsed_s + wait_s > self.policy.deadline_s:
            return None
        return NextTry(route=self._route, avoid=frozenset(self._tried), wait_s=wait_s)


def retry_after_s(value: str, now_s: float) -> float:
    """Parses a `Retry-After` header (seconds or an HTTP date); 0 if empty or malformed, at most 30.

    Args:
        now_s: current time, seconds since 1970.

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
