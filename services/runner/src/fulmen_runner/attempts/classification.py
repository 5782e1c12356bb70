"""Decides whose fault a failure is, by what the model proxy recorded of the attempt.

Invariant: an attempt is only ever reported as succeeded when the store has acknowledged every span that it made, and
every span of its model calls is known to be stored, by the same proxy instances that ran when it began. Otherwise it
is INFRA: tried again, never a reward.
"""

from dataclasses import dataclass

from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome, Succeeded

InstanceIds = tuple[str, ...]
"""The instance of each configured proxy, in the order of the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureEvidence:
    """What the proxies say of an attempt once all its spans are stored.

    Attributes:
        instance_ids: Who said so.
        call_count: Model calls of the attempt.
        infra_failure_count: Calls that failed because a backend, the proxy or the network did.
        throttled_count: Calls that were refused for want of room (429 or 503).
        prompt_token_count: Tokens of the prompts of all calls.
        completion_token_count: Tokens of the answers of all calls.
    """

    instance_ids: InstanceIds = ()
    call_count: int = 0
    infra_failure_count: int = 0
    throttled_count: int = 0
    prompt_token_count: int = 0
    completion_token_count: int = 0


def classify(
    outcome: Outcome, *, before: InstanceIds, evidence: CaptureEvidence | None, undelivered_spans: int = 0
) -> Outcome:
    """Returns the outcome to report.

    Args:
        outcome: What the agent and its grader made of it.
        before: The proxies when the attempt began.
        evidence: The proxies' answer at the end; None if they did not answer in time.
        undelivered_spans: Spans that the agent made and the store has not acknowledged.
    """
    if isinstance(outcome, Failed) and outcome.kind in (FailureKind.INFRA, FailureKind.CANCELLED):
        return outcome
    if evidence is None:
        return _infra(outcome, "The model proxy did not confirm in time that all spans are stored.")
    if evidence.instance_ids != before:
        return _infra(outcome, "The model proxy restarted during the attempt; spans may be lost.")
    if undelivered_spans:
        noun = "span" if undelivered_spans == 1 else "spans"
        return _infra(outcome, f"The store did not acknowledge {undelivered_spans} {noun} of the agent in time.")
    if isinstance(outcome, Failed) and evidence.infra_failure_count:
        count = evidence.infra_failure_count
        return _infra(outcome, f"{count} model call{'s' if count > 1 else ''} failed for no fault of the agent's.")
    return outcome


def _infra(outcome: Outcome, reason: str) -> Failed:
    match outcome:
        case Succeeded():
            return Failed(kind=FailureKind.INFRA, message=reason, output=outcome.output)
        case Failed():
            message = f"{reason} ({outcome.kind}: {outcome.message})"
            return Failed(kind=FailureKind.INFRA, message=message, output=outcome.output)
