"""Figures of rollouts in a few characters, and the first failure of a summary."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import ArgumentInvalid, FulmenError, Unavailable
from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_cli.rollout.figures import (
    cost_text,
    failure_of_run,
    figure_cells,
    first_failure,
    reward_text,
    time_text,
    token_text,
)

RUN = "projects/default/trainingRuns/r"


def failed(name: str, seconds: int, message: str) -> rollout_pb2.Rollout:
    """Makes a rollout that has failed."""
    return rollout_pb2.Rollout(
        name=f"projects/default/rollouts/{name}", end_time=Timestamp(seconds=seconds), failure_message=message
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (0.26, "0.3s"), (59.94, "59.9s"), (59.96, "1m00s"), (599.4, "9m59s"), (599.6, "10m"), (3599, "59m"),
     (3600, "1h00m"), (35999, "9h59m"), (36000, "10h"), (86400, "24h")],
)  # fmt: skip
def test_a_duration_is_short(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (12_345, "12.3k"), (999_499, "999k"), (999_500, "1M"), (10**15, "1e+03T")],
)
def test_a_count_has_three_digits(count: int, text: str) -> None:
    assert token_text(count) == text


@pytest.mark.parametrize(
    ("micros", "text"),
    [(0, "$0.00"), (1, "$0.0000"), (1_234, "$0.0012"), (123_456, "$0.123"), (1_500_000, "$1.50"), (10**10, "$10,000")],
)
def test_a_cost_has_the_decimals_that_matter(micros: int, text: str) -> None:
    assert cost_text(micros) == text


def test_a_reward_has_three_decimals_or_digits() -> None:
    assert [reward_text(each) for each in (0.0, -2 / 3, 99.9, 123456.0)] == ["0.000", "-0.667", "99.900", "1.23e+05"]


def test_an_unset_figure_is_empty_and_a_zero_is_not() -> None:
    assert figure_cells(rollout_pb2.Rollout()) == ("", "", "", "")
    zeros = rollout_pb2.Rollout(reward=0, duration={}, prompt_token_count=0, completion_token_count=0, cost_micros=0)
    assert figure_cells(zeros) == ("0.000", "0.0s", "0", "$0.00")


@given(st.floats(0, 3.5e5), st.integers(0, 10**14))
def test_figures_fit_their_columns(seconds: float, count: int) -> None:
    assert len(time_text(seconds)) <= 5
    assert len(token_text(count)) <= 5


class Store:
    """A store that lists these rollouts as failed; it refuses to sort too many, or raises a given error."""

    def __init__(
        self, *rollouts: rollout_pb2.Rollout, too_many: bool = False, error: FulmenError | None = None
    ) -> None:
        self.found = list(rollouts)
        self.too_many, self.error = too_many, error

    @property
    def rollouts(self) -> Store:
        """The stub."""
        return self

    async def ListRollouts(self, request: pb.ListRolloutsRequest, *, timeout: float) -> pb.ListRolloutsResponse:
        """Lists the oldest or the newest failed rollout."""
        assert (request.training_run, list(request.states), request.page_size) == (RUN, [5], 1)
        if self.error is not None:
            raise self.error
        if self.too_many and request.order_by:
            raise ArgumentInvalid("The list is too long.")
        ordered = sorted(self.found, key=lambda each: each.end_time.seconds, reverse=not request.order_by)
        return pb.ListRolloutsResponse(rollouts=ordered[:1])


async def test_the_rollout_that_failed_first_is_told_with_its_line() -> None:
    late, early = failed("b", 9, "KeyError: 'x'"), failed("a", 3, "ValueError: no")
    assert first_failure([late, early, rollout_pb2.Rollout()]) == "first failure: a: ValueError: no"
    assert first_failure([rollout_pb2.Rollout()]) == ""
    store: Any = Store(late, early)
    assert await failure_of_run(store, RUN) == "first failure: a: ValueError: no"
    store = Store(late, early, too_many=True)
    assert await failure_of_run(store, RUN) == "last failure: b: KeyError: 'x'"


async def test_a_summary_does_without_what_the_store_does_not_tell() -> None:
    for store in (Store(), Store(error=Unavailable("Connection refused")), Store(failed("a", 1, ""))):
        told: Any = store
        assert await failure_of_run(told, RUN) == ""
