"""The due times of a cron expression in a time zone. All moments are in UTC.

Fields and days are those of Debian's cron, by the library cronsim: a time that the clocks skip is due right after, one
that they repeat is due once, and `*` in the hour or minute follows elapsed time.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Final
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

__all__ = ["cron_problem", "latest_due", "next_due", "next_dues", "time_zone_problem"]

FIELDS: Final = 5
MAX_CRON: Final = 128
MAX_TIME_ZONE: Final = 64
SECOND: Final = datetime.timedelta(seconds=1)
DAY: Final = datetime.timedelta(days=1)
NOTHING: Final = datetime.timedelta()


def cron_problem(cron: str) -> str:
    """Returns what is wrong with an expression; empty if nothing is."""
    if len(cron) > MAX_CRON:
        return f"is longer than {MAX_CRON} characters"
    fields = len(cron.split())
    if fields != FIELDS:
        return f"has {fields} fields, not 5: minute, hour, day of the month, month, day of the week"
    try:
        next(CronSim(cron, datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)))
    except CronSimError as error:
        return f"is not a cron expression: {str(error)[0].lower()}{str(error)[1:]}"
    except (StopIteration, OverflowError):
        return "is never due"
    except (ValueError, AssertionError):
        return "is not a cron expression"
    return ""


def time_zone_problem(time_zone: str) -> str:
    """Returns what is wrong with the name of a time zone; empty if nothing is."""
    if len(time_zone) > MAX_TIME_ZONE:
        return f"is longer than {MAX_TIME_ZONE} characters"
    try:
        ZoneInfo(time_zone)
    except (KeyError, ValueError, OSError):
        return f"{time_zone!r} is not a time zone of the IANA database, such as Europe/Berlin"
    return ""


def next_due(cron: str, time_zone: str, after: datetime.datetime) -> datetime.datetime | None:
    """Returns the first due time after a moment; None if there is none within 50 years, or what was stored is malformed."""
    due = _first(cron, time_zone, after, after)
    if due is not None:
        # Where the clocks leave out midnight, the library passes over the hour after it, unless it begins right before.
        for change in _set_forward(time_zone, after, due):
            earlier = _first(cron, time_zone, change - SECOND, after)
            if earlier is not None and earlier < due:
                return earlier
    return due


def _first(cron: str, time_zone: str, start: datetime.datetime, after: datetime.datetime) -> datetime.datetime | None:
    for moment in _times(cron, time_zone, start):
        due = moment.astimezone(datetime.UTC)
        # In an hour that the clocks repeat, the library begins at the first of the two.
        if due > after:
            return due
    return None


def _set_forward(time_zone: str, after: datetime.datetime, until: datetime.datetime) -> Iterator[datetime.datetime]:
    """Yields the moments after one and up to another at which the clocks are set forward, found day by day."""
    zone, start = ZoneInfo(time_zone), after.replace(microsecond=0)
    while start < until:
        end = min(start + DAY, until)
        offset = start.astimezone(zone).utcoffset() or NOTHING
        if (end.astimezone(zone).utcoffset() or NOTHING) > offset:
            before, change = start, end
            while change - before > SECOND:
                middle = before + (change - before) // (2 * SECOND) * SECOND
                if (middle.astimezone(zone).utcoffset() or NOTHING) > offset:
                    change = middle
                else:
                    before = middle
            yield change
        start = end


def next_dues(cron: str, time_zone: str, after: datetime.datetime, count: int) -> list[datetime.datetime]:
    """Returns at most `count` due times after a moment, earliest first."""
    dues: list[datetime.datetime] = []
    while len(dues) < count and (due := next_due(cron, time_zone, dues[-1] if dues else after)) is not None:
        dues.append(due)
    return dues


def latest_due(cron: str, time_zone: str, now: datetime.datetime) -> datetime.datetime | None:
    """Returns the latest due time that is not after `now`; None if there is none within 50 years."""
    start = now.replace(microsecond=0) + SECOND
    latest = None
    for moment in _times(cron, time_zone, start, reverse=True):
        latest = moment.astimezone(datetime.UTC)
        if latest <= now:
            break
    # In an hour that the clocks repeat, the library may look back from the first of the two.
    while latest is not None and (later := next_due(cron, time_zone, latest)) is not None and later <= now:
        latest = later
    return latest


def _times(
    cron: str, time_zone: str, start: datetime.datetime, *, reverse: bool = False
) -> Iterator[datetime.datetime]:
    try:
        return iter(CronSim(cron, start.astimezone(ZoneInfo(time_zone)), reverse))
    except (CronSimError, KeyError, ValueError, OSError):
        # A time zone may have left the database of this machine.
        return iter(())
