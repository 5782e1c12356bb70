"""AgentMetrics over the attempts that ended last, and the rules that look at them."""

from __future__ import annotations

import traceback
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from fulmen.hooks import AttemptEnd, RewardFact, SpansSummary
from fulmen_runner.hooks.alerts import AlertSettings, breaches
from fulmen_runner.hooks.monitor import Monitor
from fulmen_runner.hooks.windows import MAX_AGENTS, MAX_SAMPLES, AgentMetrics, Window, Windows


def ended(*, kind: str = "", reward: float | None = None, duration_s: float = 1.0, tokens: int = 0) -> AttemptEnd:
    rewards = () if reward is None else (RewardFact(value=reward),)
    spans = SpansSummary(prompt_token_count=tokens)
    return AttemptEnd(failure_kind=kind, message="", rewards=rewards, spans=spans, duration_s=duration_s)


def test_attempts_count_for_as_long_as_the_window_is() -> None:
    window = Window(window_s=10.0)
    assert window.metrics(now_s=0.0).error_rate is None
    window.add(ended(kind="TIMEOUT", duration_s=3.0), now_s=0.0)
    window.add(ended(reward=1.0, tokens=6), now_s=5.0)
    window.add(ended(kind="CANCELLED"), now_s=6.0)
    now = window.metrics(now_s=9.9)
    assert (now.attempt_count, now.error_rate, now.mean_duration_s, now.mean_tokens) == (2, 0.5, 2.0, 3.0)
    assert window.metrics(now_s=10.0).error_rate == 0.0
    assert window.metrics(now_s=15.0).attempt_count == 0


def test_a_collapse_of_rewards_is_a_drop() -> None:
    window = Window(window_s=100.0)
    for number in range(20):
        window.add(ended(reward=0.9 if number < 10 else 0.1), now_s=float(number))
    assert window.metrics(now_s=20.0).reward_drop == pytest.approx(0.8)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.floats(0, 10), st.floats(0, 5)), max_size=40))
def test_metrics_agree_with_a_simple_count(ends: list[tuple[bool, float, float]]) -> None:
    window, now_s, kept = Window(window_s=7.0), 0.0, []
    for failed, duration_s, pause_s in ends:
        now_s += pause_s
        window.add(ended(kind="TIMEOUT" if failed else "", duration_s=duration_s), now_s=now_s)
        kept.append((now_s, failed, duration_s))
        recent = [(f, d) for at_s, f, d in kept if at_s > now_s - 7.0]
        found = window.metrics(now_s=now_s)
        assert found.attempt_count == len(recent)
        assert found.error_rate == pytest.approx(sum(f for f, _ in recent) / len(recent))
        assert found.mean_duration_s == pytest.approx(sum(d for _, d in recent) / len(recent))


def test_reading_a_full_window_is_paid_for_by_many_attempts() -> None:
    window = Window(window_s=10.0)
    end = AttemptEnd(failure_kind="", message="", rewards=(), spans=None, duration_s=1.0)
    looks = []
    for number in range(2 * MAX_SAMPLES):
        window.add(end, now_s=0.0)
        if window.is_due:
            looks.append(number)
            window.metrics(now_s=0.0)
    assert looks[:256] == list(range(256))
    assert max(later - earlier for earlier, later in pairwise(looks)) == 40


def test_agents_without_end_do_not_fill_the_memory() -> None:
    windows = Windows(window_s=1.0)
    for number in range(3 * MAX_AGENTS):
        windows.of(f"agent.{number}")
    assert len(list(windows)) == MAX_AGENTS
    monitor = Monitor(registry=CollectorRegistry())
    assert len({monitor._label(f"agent.{number}") for number in range(3 * MAX_AGENTS)}) == MAX_AGENTS + 1


BAD = AgentMetrics(
    attempt_count=20, error_rate=0.6, mean_duration_s=9.0, mean_reward=0.1, mean_tokens=1.0, reward_drop=0.4
)


@pytest.mark.parametrize(
    ("limits", "rules"),
    [
        ({}, ["error_rate"]),
        ({"max_error_rate": None}, []),
        ({"max_error_rate": 0.6, "max_mean_duration_s": 8.0}, ["mean_duration"]),
        ({"max_error_rate": None, "min_mean_reward": 0.2, "max_reward_drop": 0.3}, ["reward_drop", "mean_reward"]),
        ({"min_attempts": 21}, []),
    ],
)
def test_rules_speak_when_their_limit_is_passed(limits: dict[str, float | None], rules: list[str]) -> None:
    chosen = AlertSettings(url="http://x", secret="0123456789abcdef", **limits)
    assert [breach.rule for breach in breaches(BAD, chosen)] == rules


def test_unknown_settings_of_alerts_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULMEN_ALERTS_URL", "http://x")
    monkeypatch.setenv("FULMEN_ALERTS_SECRET", "0123456789abcdef")
    assert AlertSettings.from_environment().min_attempts == 20
    monkeypatch.setenv("FULMEN_ALERTS_WINDOW", "3")
    with pytest.raises(ValueError, match="FULMEN_ALERTS_WINDOW"):
        AlertSettings.from_environment()


@pytest.mark.parametrize(
    "url", ["http://host:hidden/", "https://host:99999/hidden", "http://[::1/hidden", "http://:80/hidden", "hidden"]
)
def test_a_malformed_address_of_alerts_is_an_error_that_names_the_variables_and_not_their_values(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULMEN_ALERTS_URL", url)
    monkeypatch.setenv("FULMEN_ALERTS_SECRET", "hidden")
    with pytest.raises(ValueError, match="FULMEN_ALERTS_URL: ") as caught:
        AlertSettings.from_environment()
    said = "".join(traceback.format_exception(caught.value))
    assert "FULMEN_ALERTS_SECRET: " in said
    assert "hidden" not in said
