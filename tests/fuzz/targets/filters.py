"""Filters of `ListRollouts`, as text."""

from __future__ import annotations

from fulmen_store.rollouts.filter_parser import parse_filter
from tests.fuzz.mutation import mutate_text
from tests.fuzz.target import PureTarget

_WORDS = (
    "state", "failure_kind", "mode", "priority", "ended_attempt_count", "reward", "duration", "cost_micros", "name", "create_time", "end_time", "labels.a", "training_run",
    "AND", "OR", "NOT", "-", "(", ")", "=", "!=", "<", "<=", ">", ">=", ":", '"x"', "FAILED", "TRAIN", "3", "-3", "1e308", ".5", "1.5s", "9223372036854775808", '"projects/a/rollouts/0192f0c1*"', "*",
    '"2026-01-01T00:00:00Z"', '"2026-01-01T00:00:00+14:00"', '"0001-01-01T00:00:00Z"', '"9999-12-31T23:59:59.999999999Z"', "'y'", "\\",
)  # fmt: skip


def run(data: bytes) -> None:
    """Parses a filter."""
    parse_filter(data.decode("utf-8", "replace"))


TARGET = PureTarget(
    run=run,
    seeds=[
        b"",
        b"state = FAILED AND failure_kind != TIMEOUT OR NOT (priority > 3 AND mode = TRAIN)",
        b'create_time >= "2026-01-01T00:00:00Z" AND end_time < "2026-02-01T00:00:00.5+01:00"',
        b'labels.a = "x" AND -labels.b : "y" OR ended_attempt_count <= 2',
        b'reward < -0.5e-3 AND duration >= 1.5s AND name = "projects/default/rollouts/0192f0c1-7*" OR cost_micros > 7',
        b"(" * 30 + b"state = FAILED" + b")" * 30,
    ],
    mutate=mutate_text(_WORDS),
)
