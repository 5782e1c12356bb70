"""Figures of rollouts for people: reward, duration, tokens, cost and what failed, each in a few characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from fulmen.errors import ArgumentInvalid, FulmenError
from fulmen.rpc.services import Services
from fulmen.store.v1 import attempt_pb2, rollout_pb2, rollout_service_pb2
from fulmen_cli.names import short_name

__all__ = [
    "FIGURES",
    "cost_text",
    "failure_of_run",
    "figure_cells",
    "first_failure",
    "progress_text",
    "reward_text",
    "time_text",
    "token_text",
]

FIGURES: Final = ("reward", "time", "tokens", "cost")
"""Titles of the columns of `figure_cells`."""

SUMMARY_LIMIT_S: Final = 5.0
_MICROS: Final = 1e6
_UNITS: Final = ("", "k", "M", "G", "T")


def figure_cells(rollout: rollout_pb2.Rollout) -> tuple[str, str, str, str]:
    """Returns reward, duration, tokens (prompts and completions together) and cost; empty for what is unset."""
    tokens = rollout.prompt_token_count + rollout.completion_token_count
    return (
        reward_text(rollout.reward) if rollout.HasField("reward") else "",
        time_text(rollout.duration.ToNanoseconds() / 1e9) if rollout.HasField("duration") else "",
        token_text(tokens) if rollout.HasField("prompt_token_count") else "",
        cost_text(rollout.cost_micros) if rollout.HasField("cost_micros") else "",
    )


def reward_text(reward: float) -> str:
    """Returns a reward with three decimals, or three digits if it is large."""
    return f"{reward:.3f}" if abs(reward) < 100 else f"{reward:.3g}"


def progress_text(progress: attempt_pb2.AttemptProgress) -> str:
    """Returns what an agent reported of its progress: `25% 3 of 12 files`, `25%` or `3 of 12 files`."""
    part = f"{100 * progress.fraction:.0f}%" if progress.HasField("fraction") else ""
    return " ".join(filter(None, (part, progress.text)))


def time_text(seconds: float) -> str:
    """Returns a duration in at most five characters: `0.1s`, `59.9s`, `9m59s`, `59m`, `9h59m`, `23h`."""
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 10:
        return f"{minutes}m{rest:02}s"
    hours, minutes = divmod(minutes, 60)
    if hours == 0:
        return f"{minutes}m"
    return f"{hours}h{minutes:02}m" if hours < 10 else f"{hours}h"


def token_text(count: int) -> str:
    """Returns a count with three digits: `999`, `1.23k`, `45.6M`."""
    value = float(count)
    for unit in _UNITS[:-1]:
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}{_UNITS[-1]}"


def cost_text(micros: int) -> str:
    """Returns millionths of a US dollar as dollars, small amounts with more decimals."""
    dollars = micros / _MICROS
    if dollars >= 1000:
        return f"${dollars:,.0f}"
    decimals = 2 if dollars >= 1 or dollars == 0 else 3 if dollars >= 0.1 else 4
    return f"${dollars:.{decimals}f}"


async def failure_of_run(client: Services, run: str) -> str:
    """Returns which rollout of a training run failed first and what failed in it; empty if none did.

    Of a run with too many rollouts to sort it is the last one. It is part of summaries, and therefore never fails: what
    the store does not report is empty.
    """
    request = rollout_service_pb2.ListRolloutsRequest(
        training_run=run, states=[rollout_pb2.ROLLOUT_STATE_FAILED], order_by="end_time", page_size=1
    )
    try:
        try:
            return first_failure((await client.rollouts.ListRollouts(request, timeout=SUMMARY_LIMIT_S)).rollouts)
        except ArgumentInvalid:
            request.order_by = ""
            last = first_failure((await client.rollouts.ListRollouts(request, timeout=SUMMARY_LIMIT_S)).rollouts)
            return last.replace("first", "last", 1)
    except FulmenError:
        return ""


def first_failure(rollouts: Iterable[rollout_pb2.Rollout], *, separator: str = ": ") -> str:
    """Returns the rollout that failed first and its failure, with a separator between them; empty if none has a
    message."""
    failed = [each for each in rollouts if each.failure_message]
    first = min(failed, key=lambda each: each.end_time.ToNanoseconds(), default=None)
    return "" if first is None else f"first failure: {short_name(first.name)}{separator}{first.failure_message}"
