"""Due times come in order, none twice and none left out, whatever the clocks of a time zone do."""

from __future__ import annotations

import datetime
from typing import cast
from zoneinfo import ZoneInfo

import pytest
from cronsim import CronSim
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fulmen_store.schedules.due_times import cron_problem, latest_due, next_due, next_dues, time_zone_problem

UTC = datetime.UTC
BERLIN = "Europe/Berlin"
# Clocks of these go ahead and back by an hour or half of one, at night, at midnight, or left out a day.
ZONES = (
    "UTC", BERLIN, "America/New_York", "Australia/Lord_Howe", "America/Sao_Paulo", "Africa/Casablanca", "Asia/Kathmandu",
    "Pacific/Apia",
)  # fmt: skip
LEAVE_OUT_MIDNIGHT = ("America/Sao_Paulo", "Pacific/Apia")
CHANGES = [
    datetime.datetime(2026, 3, 29, 1, tzinfo=UTC),
    datetime.datetime(2026, 10, 25, 1, tzinfo=UTC),
    datetime.datetime(2026, 3, 8, 7, tzinfo=UTC),
    datetime.datetime(2026, 11, 1, 6, tzinfo=UTC),
    datetime.datetime(2026, 4, 4, 15, tzinfo=UTC),
    datetime.datetime(2026, 10, 3, 15, 30, tzinfo=UTC),
    datetime.datetime(2018, 11, 4, 3, tzinfo=UTC),
    datetime.datetime(2011, 12, 30, 10, tzinfo=UTC),
]
CRONS = (
    "*/15 * * * *", "30 2 * * *", "0,30 2 * * *", "*/20 2 * * *", "30 1-3 * * *", "0 0 * * *", "59 23 * * *",
    "5 */2 * * *", "0 2 29-31 * *", "*/7 1,2,3 * * SUN", "15 0 1 * *",
)  # fmt: skip
moments = st.builds(
    lambda change, seconds: change + datetime.timedelta(seconds=seconds),
    st.sampled_from(CHANGES),
    st.floats(-30_000, 30_000, allow_nan=False),
)


def utc(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=UTC)


@given(cron=st.sampled_from(CRONS), zone=st.sampled_from(ZONES), start=moments)
@settings(max_examples=300, deadline=None)
def test_each_due_time_comes_once_and_in_order(cron: str, zone: str, start: datetime.datetime) -> None:
    dues = next_dues(cron, zone, start, 8)
    assert [start, *dues] == sorted({start, *dues})
    # The same ones as of one walk that begins before the clocks change.
    walk = CronSim(cron, (start - datetime.timedelta(days=1)).astimezone(ZoneInfo(zone)))
    expected: list[datetime.datetime] = []
    while len(expected) < 8:
        due = next(walk).astimezone(UTC)
        if due > start and due not in expected:
            expected.append(due)
    # Where clocks leave out midnight, the library's walk passes over the hour after it.
    assert dues == expected or zone in LEAVE_OUT_MIDNIGHT


@given(cron=st.sampled_from(CRONS), zone=st.sampled_from(ZONES), start=moments, hours=st.integers(0, 12))
@settings(max_examples=100, deadline=None)
def test_due_times_do_not_depend_on_where_one_begins(
    cron: str, zone: str, start: datetime.datetime, hours: int
) -> None:
    dues = next_dues(cron, zone, start, 4)
    earlier = start - datetime.timedelta(hours=hours)
    while (earlier := cast(datetime.datetime, next_due(cron, zone, earlier))) <= start:
        pass
    assert [earlier, *next_dues(cron, zone, earlier, 3)] == dues


def test_times_right_after_a_midnight_that_the_clocks_leave_out_are_due() -> None:
    days_before = utc("2018-10-30T12:00")
    assert next_dues("*/30 1 * * SUN", "America/Sao_Paulo", days_before, 3) == [
        utc("2018-11-04T03:00"),
        utc("2018-11-04T03:30"),
        utc("2018-11-11T03:00"),
    ]
    assert next_due("0 0 * * SUN", "America/Sao_Paulo", days_before) == utc("2018-11-04T03:00")


@given(cron=st.sampled_from(CRONS), zone=st.sampled_from(ZONES), now=moments)
@example(cron="30 2 * * *", zone=BERLIN, now=utc("2026-10-25T01:22:35"))
@settings(max_examples=300, deadline=None)
def test_the_latest_due_time_is_the_one_before_the_next(cron: str, zone: str, now: datetime.datetime) -> None:
    latest = latest_due(cron, zone, now)
    assert latest is not None
    assert latest <= now
    following = next_due(cron, zone, latest)
    assert following is not None
    assert following > now
    assert next_due(cron, zone, latest - datetime.timedelta(microseconds=1)) == latest


def test_a_time_that_the_clocks_skip_is_due_right_after() -> None:
    assert next_due("30 2 * * *", BERLIN, utc("2026-03-28T12:00")) == utc("2026-03-29T01:00")


def test_a_time_that_the_clocks_repeat_is_due_once() -> None:
    assert next_dues("30 2 * * *", BERLIN, utc("2026-10-24T12:00"), 2) == [
        utc("2026-10-25T00:30"),
        utc("2026-10-26T01:30"),
    ]


def test_every_hour_follows_elapsed_time() -> None:
    dues = next_dues("0 * * * *", BERLIN, utc("2026-10-24T22:30"), 5)
    assert dues == [utc("2026-10-24T23:00"), *(utc(f"2026-10-25T0{hour}:00") for hour in range(4))]


@pytest.mark.parametrize(
    ("cron", "problem"),
    [
        ("0 3 * * *", ""),
        ("0 3 * * MON-FRI", ""),
        ("0 0 29 2 *", ""),
        ("0 0 30 2 *", "bad day-of-month"),
        ("61 * * * *", "bad minute"),
        ("* * * *", "has 4 fields"),
        ("* * * * * *", "has 6 fields"),
        ("@daily", "has 1 fields"),
        ("", "has 0 fields"),
        ("1,,2 * * * *", "bad minute"),
        ("* " * 100, "is longer than 128"),
        ("0 0 31 4,6 1#5", ""),
    ],
)
def test_a_malformed_expression_is_told(cron: str, problem: str) -> None:
    told = cron_problem(cron)
    assert problem in told
    assert bool(told) == bool(problem)


@given(st.lists(st.text(alphabet="0123456789*,-/L#WMONSUJAFEB²", max_size=6), min_size=5, max_size=5))
@settings(max_examples=500, deadline=None)
def test_any_text_has_a_problem_or_due_times(fields: list[str]) -> None:
    cron = " ".join(fields)
    if not cron_problem(cron):
        start = utc("2026-01-01T00:00")
        due = next_due(cron, BERLIN, start)
        assert due is None or due > start


@pytest.mark.parametrize("zone", ["Europe/Atlantis", "../../etc/passwd", "/etc/passwd", "Europe", "x" * 65, "a\0b", ""])
def test_what_is_no_time_zone_is_told(zone: str) -> None:
    assert time_zone_problem(zone)


def test_a_stored_time_zone_that_is_gone_is_never_due() -> None:
    assert next_due("* * * * *", "Europe/Atlantis", utc("2026-01-01T00:00")) is None
    assert latest_due("* * * * *", "Europe/Atlantis", utc("2026-01-01T00:00")) is None
