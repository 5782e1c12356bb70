"""The exchange of a run, collected from its events and shards; and how numbers are formatted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen.algorithm.v1 import training_run_pb2
from fulmen_cli.exchange.commands import amount, size
from fulmen_cli.exchange.events import NOTICES_KEPT, ExchangeEvents, Metric, follow_events
from fulmen_cli.exchange.shards import ServiceShards, last_round
from tests.support.cli.run_events import SUCCEEDED, Event, RunService, run, step


def notice(message: str, severity: str = "info") -> Event:
    return Event(notice=training_run_pb2.RunNotice(severity=severity, message=message))


def history(*events: Event, asked: training_run_pb2.TrainingRun | None = None) -> ExchangeEvents:
    shown = ExchangeEvents(run=asked or run())
    for event in events:
        shown.add(event)
    return shown


def test_the_share_of_an_exchange_is_that_of_the_time_that_training_took_so_far() -> None:
    shown = history(
        step(1, spent_train_seconds=1.0, spent_start_seconds=7.0),
        step(2, exchange_ratio=4.0, spent_train_seconds=3.0, spent_exchange_seconds=1.0),
    )

    assert shown.share == Metric(step=2, value=0.25)


def test_a_run_without_an_exchange_has_no_share_of_it() -> None:
    shown = history(step(1, spent_train_seconds=1.0))

    assert shown.share is None
    assert not shown.any_exchange


def test_what_a_rollback_has_taken_back_is_not_shown() -> None:
    shown = history(
        step(1, exchange_ratio=4.0),
        step(5, exchange_cosine=0.9),
        Event(run=run(1, rollbacks=1)),
        step(2, exchange_ratio=16.0),
    )

    assert shown.metrics == {"exchange_ratio": Metric(step=2, value=16.0)}


def test_only_what_was_decided_on_the_exchange_is_shown_and_of_that_the_newest() -> None:
    texts = [f"round {number}" for number in range(NOTICES_KEPT + 3)]
    shown = history(notice("Goes on."), *(notice(f"exchange: {text}", "warning") for text in texts))

    assert [each.message for each in shown.notices] == texts[-NOTICES_KEPT:]
    assert {each.severity for each in shown.notices} == {"warning"}


@pytest.mark.parametrize(
    ("events", "is_current"),
    [
        ([], False),
        ([step(2)], False),
        ([step(3)], False),
        ([step(3), Event(run=run(2, rollbacks=1))], False),
        ([step(3), Event(run=run(2, rollbacks=1)), step(3)], True),
    ],
)
def test_events_are_current_once_they_reach_the_step_of_the_run_in_its_last_branch(
    events: Sequence[Event], is_current: bool
) -> None:
    assert history(*events, asked=run(3, rollbacks=1)).is_current is is_current


async def test_the_events_of_a_running_run_are_followed_up_to_now() -> None:
    service = RunService([Event(run=run()), step(1, exchange_ratio=4.0)])
    async with follow_events(service.client, run(1)) as shown:
        shown.check()
        assert shown.metrics == {"exchange_ratio": Metric(step=1, value=4.0)}

    assert service.cancelled


async def test_the_events_of_an_ended_run_are_read_to_the_end() -> None:
    service = RunService([step(1), Event(run=run(1, state=SUCCEEDED))], closes=True)
    async with follow_events(service.client, run(1, state=SUCCEEDED)) as shown:
        assert shown.run.state == SUCCEEDED


def went(*ranks: int, **more: Any) -> pb.GetRoundResponse:
    return pb.GetRoundResponse(ranks=ranks, raw_bytes=400, sent_bytes=4, reply_bytes=5, **more)


def test_how_a_round_went_is_put_together_of_all_shards_that_are_as_far() -> None:
    services = [
        ServiceShards(target="a", rounds={0: (7, went(0, 1, 2, duration_s=0.5)), 1: (8, went(0))}),
        ServiceShards(target="b", rounds={2: (7, went(0, 2, duration_s=0.75, late_ranks=[1]))}),
        ServiceShards(target="c"),
    ]
    last = last_round(services)

    assert last is not None
    assert (last.number, last.shard_count, last.ranks, last.late_ranks) == (7, 2, [0, 2], [1])
    assert (last.raw_bytes, last.sent_bytes, last.reply_bytes, last.duration_s) == (800, 8, 10, 0.75)
    assert last_round(services[2:]) is None


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (12_345, "12.3 kB"), (1.5e9, "1.5 GB"), (2e18, "2e+03 PB")],
)
def test_sizes_have_three_digits(size_bytes: float, text: str) -> None:
    assert size(size_bytes) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [("sent_bytes", "2 B"), ("wait_seconds", "2 s"), ("ratio", "2x"), ("late_share", "200 %"), ("cosine", "2")],
)
def test_a_metric_is_formatted_in_the_unit_of_its_name(name: str, text: str) -> None:
    assert amount(name, 2.0) == text
