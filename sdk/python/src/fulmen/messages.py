"""Values of the API's messages as plain Python values."""

from __future__ import annotations

import datetime
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

__all__ = ["enum_number", "enum_word", "moment", "seconds", "timestamp"]


def enum_word(message: Message, field: str) -> str:
    """Returns the short lower-case name of an enum value: `RolloutState` 4 is `succeeded`."""
    descriptor = message.DESCRIPTOR.fields_by_name[field].enum_type
    number = getattr(message, field)
    value = descriptor.values_by_number.get(number)
    if value is None:
        return f"unknown ({number})"
    zero: str = descriptor.values_by_number[0].name
    prefix = zero.removesuffix("UNSPECIFIED")
    word: str = value.name
    return "" if number == 0 else word.removeprefix(prefix).lower()


def enum_number(enum: Any, word: str) -> Any:
    """Returns the number of a short name: of `RolloutState`, `succeeded` is 4.

    Args:
        enum: the generated enum.
        word: the name without its prefix; upper or lower case.

    Raises:
        ValueError: if the name does not exist; the message lists all names.
    """
    names = [str(name) for name in enum.keys()]  # noqa: SIM118  # No mapping.
    prefix = names[0].removesuffix("UNSPECIFIED")
    full = f"{prefix}{word.upper()}"
    if full not in names[1:]:
        known = ", ".join(name.removeprefix(prefix).lower() for name in names[1:])
        raise ValueError(f"no {word!r}; known: {known}")
    return enum.Value(full)


def moment(time: Timestamp) -> datetime.datetime | None:
    """Returns a time in UTC; None if unset."""
    if not time.seconds and not time.nanos:
        return None
    return datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=time.ToMicroseconds())


def timestamp(time: datetime.datetime) -> Timestamp:
    """Returns a time as a message; one without a zone is local time."""
    message = Timestamp()
    message.FromDatetime(time.astimezone(datetime.UTC))
    return message


def seconds(duration: Duration) -> float:
    """Returns a duration in seconds."""
    return float(duration.ToNanoseconds()) / 1e9
