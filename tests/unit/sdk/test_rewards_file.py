"""The file by which commands tell their runner about rewards."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fulmen.agent import RewardKey
from fulmen.emit import RewardInvalid
from fulmen.rewards_file import append_rewards, append_undelivered_spans, read_statements

KEYS = st.tuples(
    st.from_regex(r"[a-z0-9_.-]{1,64}", fullmatch=True),
    st.none() | st.integers(0, 2**31 - 1),
    st.just(b"") | st.binary(min_size=8, max_size=8).filter(any),
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(KEYS, st.floats(allow_nan=False, allow_infinity=False), max_size=5))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rewards: dict[RewardKey, float]) -> None:
    path = tmp_path_factory.mktemp("attempt") / "rewards"
    append_rewards(str(path), rewards.items())
    assert read_statements(path.read_text()).rewards == rewards


def test_later_lines_replace_earlier_ones_and_undelivered_spans_add_up(tmp_path: Path) -> None:
    path = str(tmp_path / "rewards")
    for value in (1.0, 2.0):
        append_rewards(path, [(("reward", None, b""), value), (("reward", 1, b""), value)])
        append_undelivered_spans(path, 2)
    found = read_statements(Path(path).read_text() + "\n")
    assert found.rewards == {("reward", None, b""): 2.0, ("reward", 1, b""): 2.0}
    assert found.undelivered_spans == 4


def test_a_line_of_another_language_needs_only_a_value() -> None:
    assert read_statements('{"value":1}\r\n\r\n{"value": 0.5, "dimension": "style"}').rewards == {
        ("reward", None, b""): 1.0,
        ("style", None, b""): 0.5,
    }


@pytest.mark.parametrize(
    "line",
    [
        "0.5",
        "{",
        "{}",
        '{"value": "1"}',
        '{"value": NaN}',
        '{"value": 1, "step": -1}',
        '{"value": 1, "step": true}',
        '{"value": 1, "dimension": "Big"}',
        '{"value": 1, "dimension": 3}',
        '{"value": 1, "span_id": "abc"}',
        '{"value": 1, "span_id": 5}',
        '{"value": 1, "span_id": "0000000000000000"}',
        '{"value": 1, "reward": 1}',
        '{"undelivered_spans": -1}',
        "[" * 100_000,
    ],
)
def test_a_malformed_line_is_named_by_its_number(line: str) -> None:
    with pytest.raises(RewardInvalid, match="Line 2 "):
        read_statements('{"value": 1}\n' + line)
