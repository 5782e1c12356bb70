"""Times and durations of a request: protobuf decodes values that no clock can show, and converting them raises.

Invariant: a servicer sees only moments that `ToDatetime` and the like can convert.
"""

from functools import cache
from typing import Any, Final, NamedTuple

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from fulmen.errors import Violation

_TIMESTAMP: Final = "google.protobuf.Timestamp"
_DURATION: Final = "google.protobuf.Duration"
# From the year 1 to the end of 9999, and 10,000 years: the ranges of the two messages.
_MIN_TIME_S, _MAX_TIME_S = -62_135_596_800, 253_402_300_799
_MAX_DURATION_S: Final = 315_576_000_000
_NS_PER_S: Final = 1_000_000_000
_CHECKED_LATER: Final = frozenset({"fulmen.store.v1.Rollout", "fulmen.store.v1.SpanChunk"})
"""Messages that their servicer checks itself. A creation has thousands of rollouts, and a second check costs 3 % of it. A bad
chunk is rejected in the answer, and does not end the stream."""


class _Fields(NamedTuple):
    """The fields of a message that are moments or may contain some, with the names of their types."""

    single: tuple[tuple[str, str], ...]
    repeated: tuple[tuple[str, str], ...]
    maps: tuple[tuple[str, str], ...]


def moment_problems(message: Message) -> list[Violation]:
    """Returns a violation for every time or duration of a message that is out of range."""
    problems: list[Violation] = []
    _collect(message, (), problems)
    return problems


def _collect(message: Message, path: tuple[object, ...], problems: list[Violation]) -> None:
    single, repeated, maps = _fields(message.DESCRIPTOR)
    for name, type_name in single:
        if message.HasField(name):
            _collect_value(getattr(message, name), type_name, (*path, name), problems)
    for name, type_name in repeated:
        for index, value in enumerate(getattr(message, name)):
            _collect_value(value, type_name, (*path, name, index), problems)
    for name, type_name in maps:
        for key, value in getattr(message, name).items():
            _collect_value(value, type_name, (*path, name, key), problems)


def _collect_value(value: Any, type_name: str, path: tuple[object, ...], problems: list[Violation]) -> None:
    if type_name == _TIMESTAMP:
        if not (_MIN_TIME_S <= value.seconds <= _MAX_TIME_S and 0 <= value.nanos < _NS_PER_S):
            problems.append(Violation(field=_text(path), description="is not a time between the years 1 and 9999"))
    elif type_name == _DURATION:
        seconds, nanos = value.seconds, value.nanos
        if abs(seconds) > _MAX_DURATION_S or abs(nanos) >= _NS_PER_S or seconds * nanos < 0:
            problems.append(Violation(field=_text(path), description="is not a duration of at most 10,000 years"))
    else:
        _collect(value, path, problems)


def _text(path: tuple[object, ...]) -> str:
    """Returns a path such as `rollouts[3].deadline_time`."""
    parts = (f".{part}" if isinstance(part, str) else f"[{part}]" for part in path)
    return "".join(parts)[1:]


@cache
def _fields(descriptor: Descriptor) -> _Fields:
    single: list[tuple[str, str]] = []
    repeated: list[tuple[str, str]] = []
    maps: list[tuple[str, str]] = []
    for field in descriptor.fields:
        inner = field.message_type
        if inner is None:
            continue
        is_map = inner.GetOptions().map_entry
        held = inner.fields_by_name["value"].message_type if is_map else inner
        if held is not None and _may_hold_moments(held, frozenset()):
            # Of fields with messages, only repeated ones have no presence.
            kind = maps if is_map else single if field.has_presence else repeated
            kind.append((field.name, held.full_name))
    return _Fields(tuple(single), tuple(repeated), tuple(maps))


def _may_hold_moments(descriptor: Descriptor, above: frozenset[str]) -> bool:
    name = descriptor.full_name
    if name in (_TIMESTAMP, _DURATION):
        return True
    inner = (field.message_type for field in descriptor.fields)
    return name not in _CHECKED_LATER | above and any(
        one is not None and _may_hold_moments(one, above | {name}) for one in inner
    )
