"""Whatever an agent has left in a report, it can be sent."""

from __future__ import annotations

import json

import pytest

from fulmen_runner.attempts.outcome import Failed, FailureKind, cut_at_front
from fulmen_runner.attempts.session import Report
from fulmen_runner.leases.codec import write_result
from tests.support.runner.assignments import assignment

HALF = json.loads('"an answer \\ud83d"')


def test_half_of_a_surrogate_pair_in_a_message_does_not_keep_its_report_from_the_store() -> None:
    report = Report(assignment=assignment(), outcome=Failed(kind=FailureKind.AGENT_ERROR, message=HALF))
    assert write_result(report).failure_message == "an answer ?"


@pytest.mark.parametrize(
    ("text", "limit", "end"),
    [("abc", 3, "abc"), ("abc", 2, "bc"), ("abc", 0, ""), ("aä", 2, "ä"), ("aä", 1, ""), (HALF, 2, " ?")],
)
def test_a_text_is_cut_at_whole_characters(text: str, limit: int, end: str) -> None:
    assert cut_at_front(text, limit) == end
