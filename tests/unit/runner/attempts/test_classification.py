"""Whose fault a failure is."""

from __future__ import annotations

import pytest

from fulmen_runner.attempts.classification import CaptureEvidence, classify
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome, Output, Reward, Succeeded

OUTPUT = Output(content=b"x", content_type="text/plain")
SUCCESS = Succeeded(rewards=(Reward(value=1.0),), output=OUTPUT)
GOOD = CaptureEvidence(call_count=2)
FAILED_CALLS = CaptureEvidence(call_count=2, infra_failure_count=1)
STARTED = 100.0
OUTAGE = CaptureEvidence(call_count=2, unreachable_at=STARTED)
EARLIER_OUTAGE = CaptureEvidence(call_count=2, unreachable_at=STARTED - 1)
LOST = CaptureEvidence(lost=True)


def failed(kind: FailureKind) -> Failed:
    return Failed(kind=kind, message="why", output=OUTPUT)


@pytest.mark.parametrize(
    ("outcome", "evidence", "expected"),
    [
        (SUCCESS, GOOD, None),
        (SUCCESS, FAILED_CALLS, None),
        (SUCCESS, OUTAGE, None),
        (SUCCESS, LOST, FailureKind.INFRA),
        (SUCCESS, None, FailureKind.INFRA),
        *[
            (failed(kind), evidence, expected)
            for kind in (FailureKind.AGENT_ERROR, FailureKind.TIMEOUT, FailureKind.REWARD_MISSING)
            for evidence, expected in [
                (GOOD, kind),
                (FAILED_CALLS, FailureKind.INFRA),
                (OUTAGE, FailureKind.INFRA),
                (EARLIER_OUTAGE, kind),
                (LOST, FailureKind.INFRA),
                (None, FailureKind.INFRA),
            ]
        ],
        *[
            (failed(kind), evidence, kind)
            for kind in (FailureKind.INFRA, FailureKind.CANCELLED)
            for evidence in (GOOD, FAILED_CALLS, OUTAGE, LOST, None)
        ],
    ],
)
def test_the_table(outcome: Outcome, evidence: CaptureEvidence | None, expected: FailureKind | None) -> None:
    result = classify(outcome, started_at=STARTED, evidence=evidence)
    match result:
        case Succeeded():
            assert expected is None
            assert result == outcome
        case Failed():
            assert result.kind is expected
            assert result.output == OUTPUT
            if isinstance(outcome, Failed) and expected is not outcome.kind:
                assert result.message.endswith(f"({outcome.kind.value}: why)")
