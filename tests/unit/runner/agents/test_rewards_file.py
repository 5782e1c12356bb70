"""The file that commands append their rewards to."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulmen.agent import RewardKey
from fulmen.attempt_files import append_rewards, append_undelivered_spans
from fulmen_runner.agents.rewards_file import MAX_REWARDS_FILE_BYTES, read_rewards_file
from fulmen_runner.attempts.errors import AgentFailed, HostUnavailable
from fulmen_runner.attempts.outcome import Reward

KEYS = st.tuples(
    st.from_regex(r"[a-z0-9_.-]{1,64}", fullmatch=True),
    st.none() | st.integers(0, 2**31 - 1),
    st.just(b"") | st.binary(min_size=8, max_size=8).filter(any),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rewards.jsonl"


def test_each_line_is_a_reward(path: Path) -> None:
    path.write_text(
        '{"value": 0.5}\n\n  {"value": 1, "dimension": "style"}\r\n{"value": true, "step": 3}\n'
        '{"value": 2, "dimension": "reward", "step": null, "span_id": "00f067aa0ba902b7"}'
    )
    assert read_rewards_file(path) == (
        Reward(value=0.5),
        Reward(value=1.0, dimension="style"),
        Reward(value=1.0, step=3),
        Reward(value=2.0, span_id=bytes.fromhex("00f067aa0ba902b7")),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(st.dictionaries(KEYS, st.floats(allow_nan=False, allow_infinity=False), max_size=5))
def test_what_agents_emit_is_what_is_read(path: Path, rewards: dict[RewardKey, float]) -> None:
    path.unlink(missing_ok=True)
    append_rewards(str(path), rewards.items())
    assert {(each.dimension, each.step, each.span_id): each.value for each in read_rewards_file(path)} == rewards


def test_spans_that_did_not_arrive_are_no_fault_of_the_commands(path: Path) -> None:
    append_rewards(str(path), [(("reward", 2, b"12345678"), 1.0)])
    assert read_rewards_file(path) == (Reward(value=1.0, step=2, span_id=b"12345678"),)
    append_undelivered_spans(str(path), 2)
    append_undelivered_spans(str(path), 3)
    with pytest.raises(HostUnavailable, match="5 spans"):
        read_rewards_file(path)


def test_of_the_same_kind_the_last_one_counts(path: Path) -> None:
    path.write_text("".join(json.dumps({"value": value, "step": 1}) + "\n" for value in range(5000)))
    assert read_rewards_file(path) == (Reward(value=4999.0, step=1),)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("0.5", "not an object with a value"),
        ('{"dimension": "a"}', "not an object with a value"),
        ('{"value": "1"}', "not a finite number"),
        ('{"value": NaN}', "not a finite number"),
        ('{"value": 1e999}', "not a finite number"),
        ('{"value": 1' + "0" * 400 + "}", "Reward"),
        ('{"value": 1, "reward": 2}', "unknown member 'reward'"),
        ('{"value": 1, "dimension": "Up"}', "is not 1 to 64 characters"),
        ('{"value": 1, "dimension": 5}', "dimension is not a string"),
        ('{"value": 1, "step": -1}', "is not an integer from 0"),
        ('{"value": 1, "step": 1.5}', "is not an integer from 0"),
        ('{"value": 1, "span_id": "xyz"}', "16 hexadecimal digits"),
        ('{"value": 1, "span_id": "00 00 00 00 00 0"}', "span"),
        ('{"value": 1, "span_id": "0000000000000000"}', "zero"),
        ('{"undelivered_spans": -1}', "not an object with a value"),
        ("{", "is not JSON"),
        ("\xff", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_line_that_is_no_reward_is_named(path: Path, line: str, says: str) -> None:
    path.write_bytes(b'{"value": 1}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(AgentFailed, match=says) as caught:
        read_rewards_file(path)
    assert "line 2: " in str(caught.value)
    assert len(str(caught.value)) < 300


def test_all_wrong_lines_are_named_up_to_a_number(path: Path) -> None:
    path.write_text("x\n" * 15)
    with pytest.raises(AgentFailed, match=r"line 1: .*line 10: .*and 5 more") as caught:
        read_rewards_file(path)
    assert "line 11" not in str(caught.value)


def test_a_file_that_is_gone_or_empty_holds_none(path: Path) -> None:
    assert read_rewards_file(path) == ()
    path.touch()
    assert read_rewards_file(path) == ()


def test_a_large_file_is_not_read(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_REWARDS_FILE_BYTES + 1)
    with pytest.raises(AgentFailed, match="at most 1048576"):
        read_rewards_file(path)


def other_file(path: Path) -> Path:
    other = path.with_name("other")
    other.write_text('{"value": 1}\n')
    return other


def test_nothing_but_a_plain_file_is_read(path: Path) -> None:
    for make in (
        lambda: path.symlink_to(other_file(path)),
        lambda: os.link(other_file(path), path),
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: path.symlink_to("/dev/zero"),
    ):
        make()
        with pytest.raises(AgentFailed, match="rewards file"):
            read_rewards_file(path)
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_content_is_read_or_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        rewards = read_rewards_file(path)
    except AgentFailed:
        return
    assert all(isinstance(reward, Reward) for reward in rewards)
