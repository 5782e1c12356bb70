"""Classifies outcomes: a failure or data loss of the infrastructure becomes INFRA.

Invariant: an attempt is reported as succeeded only if the store has acknowledged all its spans and a proxy has
confirmed that all spans of its model calls are stored, and that none was lost with a proxy that was killed.
Otherwise it is INFRA, which is retried and never rewarded.
"""

import math
from dataclasses import dataclass

from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome, Succeeded


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureEvidence:
    """The proxies' summary of an attempt, given once all its spans are stored.

    Attributes:
        lost: Whether a proxy was killed that may have held spans of the attempt.
        call_count: Number of model calls.
        unreachable_at: When a proxy last did not answer this runner immediately, monotonic seconds.
        infra_failure_count: Calls that failed because of a backend, the proxy or the network.
        throttled_count: Calls rejected for lack of capacity (429 or 503).
        prompt_token_count: Prompt tokens of all calls.
        completion_token_count: Completion tokens of all calls.
    """

    lost: bool = False
    unreachable_at: float = -math.inf
    call_count: int = 0
    infra_failure_count: int = 0
    throttled_count: int = 0
    prompt_token_count: int = 0
    completion_token_count: int = 0


def classify(
    outcome: Outcome,
    *,
    started_at: float,
    evidence: CaptureEvidence | None,
    undelivered_spans: int = 0,
) -> Outcome:
    """Returns the outcome to report.

    Args:
        outcome: Outcome of agent and grader.
        started_at: When it started, monotonic seconds.
        evidence: The proxies' summary; None if they did not confirm in time.
        undelivered_spans: Number of the agent's spans that the store has not acknowledged.
    """
    if isinstance(outcome, Failed) and outcome.kind in (FailureKind.INFRA, FailureKind.CANCELLED):
        return outcome
    if evidence is None:
        return _infra(outcome, "model proxy did not confirm in time that all spans are stored")
    if evidence.lost:
        return _infra(outcome, "model proxy was killed during the attempt; spans may be lost")
    if undelivered_spans:
        noun = "span" if undelivered_spans == 1 else "spans"
        return _infra(outcome, f"store did not acknowledge {undelivered_spans} {noun} of the agent in time")
    if isinstance(outcome, Failed) and evidence.infra_failure_count:
        count = evidence.infra_failure_count
        return _infra(outcome, f"{count} model call{'s' if count > 1 else ''} failed because of the infrastructure")
    if isinstance(outcome, Failed) and evidence.unreachable_at >= started_at:
        # Calls that the agent could not make never reached the proxy, which does not count them.
        return _infra(outcome, "model proxy could not be reached during the attempt")
    return outcome


def _infra(outcome: Outcome, reason: str) -> Failed:
    match outcome:
        case Succeeded():
            return Failed(kind=FailureKind.INFRA, message=reason, output=outcome.output)
        case Failed():
            message = f"{reason} ({outcome.kind}: {outcome.message})"
            return Failed(kind=FailureKind.INFRA, message=message, output=outcome.output)
