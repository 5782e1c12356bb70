"""The file by which commands tell their runner about rewards: what is written into it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fulmen.attempt_files import append_rewards, append_undelivered_spans, report_undelivered_spans


def test_each_statement_is_a_line_of_json(tmp_path: Path) -> None:
    path = tmp_path / "rewards"
    append_rewards(str(path), [(("reward", None, b""), 1.0), (("style", 3, bytes(range(8))), 0.5)])
    append_undelivered_spans(str(path), 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"value": 1.0, "dimension": "reward"},
        {"value": 0.5, "dimension": "style", "step": 3, "span_id": "0001020304050607"},
        {"undelivered_spans": 2},
    ]


def test_spans_that_did_not_arrive_are_told_to_a_person_and_to_a_runner_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report_undelivered_spans(1)
    path = tmp_path / "rewards"
    monkeypatch.setenv("FULMEN_REWARDS_FILE", str(path))
    report_undelivered_spans(0)
    assert not path.exists()
    report_undelivered_spans(3)
    assert json.loads(path.read_text()) == {"undelivered_spans": 3}
    told = [f"fulmen: {count} spans of this process did not reach the store." for count in (1, 3)]
    assert capsys.readouterr().err.splitlines() == told
