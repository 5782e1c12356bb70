"""Changes inputs: bytes as bytes, JSON by its nodes, protobuf messages by their fields."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

__all__ = [
    "MAX_BYTES",
    "Mutation",
    "decoded",
    "framed",
    "mutate_bytes",
    "mutate_json",
    "mutate_message",
    "mutate_text",
    "unframed",
]

Mutation = Callable[[bytes, random.Random], bytes]
"""Returns a changed input."""

MAX_BYTES = 64 * 1024

TEXTS = (
    "", "x", "a" * 129, "nul \0", "é☃", "😀" * 9, "\ud800", "%s%n{}", "'; drop table item; --", "../../etc", "a=b", "\r\n",
    "projects/*", "projects/default", "resources/x/versions/1", "latest", "9" * 30, "-1", "1e999", "NaN", "null",
)  # fmt: skip
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    1000,
    2**31 - 1,
    -(2**31),
    2**31,
    2**53 + 1,
    2**63 - 1,
    -(2**63),
    2**64,
    10**30,
    10**400,
)
REALS = (0.0, -0.0, 1.5, -1.0, 1e-320, 1e300, float("inf"), float("-inf"), float("nan"))
PIECES = (
    b"\0",
    b"\xff",
    b"\xed\xa0\x80",
    b"\r\n",
    b"\n\n",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"\\u0000",
    b"\\ud800",
)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Cuts, changes, inserts, doubles or moves bytes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        place = rng.randrange(len(changed) + 1)
        end = min(len(changed), place + rng.choice((1, 1, 2, 4, 8, 64)))
        match rng.randrange(7):
            case 0:
                del changed[place:end]
            case 1 if place < len(changed):
                changed[place] ^= 1 << rng.randrange(8)
            case 2:
                changed[place:end] = rng.randbytes(end - place)
            case 3:
                changed[place:place] = rng.choice(PIECES)
            case 4:
                changed[place:place] = changed[place:end] * rng.choice((1, 2, 50))
            case 5:
                del changed[place:]
            case _:
                other = rng.randrange(len(changed) + 1)
                changed[other:other] = changed[place:end]
    return bytes(changed[:MAX_BYTES])


def mutate_text(words: Sequence[str]) -> Mutation:
    """Returns a mutation of texts of a grammar, by its words."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.3:
            return mutate_bytes(data, rng)
        text = data.decode("utf-8", "replace")
        for _ in range(rng.choice((1, 1, 2, 3))):
            place = rng.randrange(len(text) + 1)
            end = min(len(text), place + rng.choice((0, 0, 1, 5, 20)))
            word = rng.choice((*words, *words, *TEXTS))
            text = text[:place] + rng.choice(("", " ", "\n")) + word + rng.choice(("", " ", "\n")) + text[end:]
        return text[:MAX_BYTES].encode("utf-8", "surrogatepass")

    return mutate


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Changes a node of a JSON document; bytes that are no JSON as bytes."""
    if rng.random() < 0.2:
        return mutate_bytes(data, rng)
    deep = rng.random() < 0.02
    try:
        document = json.loads(data)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            document = _changed(document, rng)
        if deep:
            document = _replaced(document, rng)
        packed = json.dumps(document, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return mutate_bytes(data, rng)
    if deep:
        depth = rng.choice((300, 900, 1100, 5000))
        opening, closing = rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        packed = packed.replace(_DEEP, opening * depth + b"1" + closing * depth)
    return (mutate_bytes(packed, rng) if rng.random() < 0.05 else packed)[:MAX_BYTES]


_DEEP = b'"@deep@"'


def _replaced(document: Any, rng: random.Random) -> Any:
    """Returns the document with one node replaced by the mark of a deep one, which no encoder could write."""
    if not isinstance(document, dict | list) or not document or rng.random() < 0.2:
        return "@deep@"
    key = rng.choice(list(document) if isinstance(document, dict) else range(len(document)))
    document[key] = _replaced(document[key], rng)
    return document


def _changed(document: Any, rng: random.Random) -> Any:
    """Returns the document with one node changed, chosen by walking down at random."""
    if not isinstance(document, dict | list) or not document or rng.random() < 0.15:
        return _foreign(document, rng)
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    key = rng.choice(keys)
    match rng.randrange(9):
        case 0:
            del document[key]
        case 1 if isinstance(document, dict):
            document[rng.choice((*keys, *TEXTS[:5], "index", "type", "id"))] = document.pop(key)
        case 1:
            document.insert(key, copy.deepcopy(document[key]))
        case 2 if isinstance(document, dict):
            document[rng.choice(keys)] = copy.deepcopy(document[key])
        case 3:
            document[key] = _foreign(document[key], rng)
        case _:
            document[key] = _changed(document[key], rng)
    return document


def _foreign(value: Any, rng: random.Random) -> Any:
    """Returns a value of another type or size."""
    match rng.randrange(10):
        case 0:
            return None
        case 1:
            return rng.choice((True, False))
        case 2 | 3:
            return rng.choice(NUMBERS)
        case 4:
            return rng.choice(REALS)
        case 5 | 6:
            return rng.choice(TEXTS)
        case 7:
            return rng.choice(([], {}, [None], [[]], [0, "x"], {"": None}, {"index": 0}, [{}], [{"index": "0"}]))
        case 8:
            return [value] * rng.choice((1, 2, 30))
        case _:
            for _ in range(rng.choice((1, 3, 200))):
                value = [value] if rng.random() < 0.5 else {"a": value}
            return value


def mutate_message(message: Message, rng: random.Random, names: Sequence[str] = (), depth: int = 5) -> None:
    """Changes a field of a message, or of one below it, in place."""
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    for _ in range(rng.choice((1, 1, 2, 3))):
        _mutate_field(message, rng.choice(fields), rng, names, depth)


def _mutate_field(
    message: Message, field: FieldDescriptor, rng: random.Random, names: Sequence[str], depth: int
) -> None:
    is_message = field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif field.is_repeated:
        _mutate_repeated(getattr(message, field.name), field, rng, names, depth)
    elif is_message:
        if depth:
            inner = getattr(message, field.name)
            inner.SetInParent()
            mutate_message(inner, rng, names, depth - 1)
    else:
        setattr(message, field.name, _scalar(field, rng, names))


def _mutate_repeated(values: Any, field: FieldDescriptor, rng: random.Random, names: Sequence[str], depth: int) -> None:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key_field, value_field = field.message_type.fields
        key = _scalar(key_field, rng, names)
        if value_field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            if depth:
                mutate_message(values[key], rng, names, depth - 1)
        else:
            values[key] = _scalar(value_field, rng, names)
        return
    if values and rng.random() < 0.4:
        place = rng.randrange(len(values))
        if rng.random() < 0.3:
            del values[place]
        elif field.message_type is not None:
            mutate_message(values[place], rng, names, max(0, depth - 1))
        else:
            values[place] = _scalar(field, rng, names)
        return
    for _ in range(rng.choice((1, 1, 2, 3, 40))):
        if field.message_type is None:
            values.append(_scalar(field, rng, names))
        elif values and rng.random() < 0.5:
            values.add().CopyFrom(rng.choice(list(values)))
        elif depth:
            mutate_message(values.add(), rng, names, depth - 1)


_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def _scalar(field: FieldDescriptor, rng: random.Random, names: Sequence[str]) -> Any:
    """Returns a value of a field that is no message, limits among them."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return rng.choice((*(value.number for value in field.enum_type.values), 99, -1))
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice((b"", b"x", rng.randbytes(8), rng.randbytes(16), rng.randbytes(300), b"{}", b"[]", b"\xff"))
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        text: str = rng.choice((*names, *names, *TEXTS))
        return text.encode("utf-8", "replace").decode()
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if field.cpp_type in _RANGES:
        low, high = _RANGES[field.cpp_type]
        return min(high, max(low, rng.choice(NUMBERS)))
    value = rng.choice(REALS)
    return value if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE or abs(value) < 1e38 else 3e38


def decoded(kind: type[Message], data: bytes) -> Message:
    """Returns a message; an empty one if the bytes are none."""
    try:
        return kind.FromString(data)
    except DecodeError:
        return kind()


def framed(head: str, *parts: bytes) -> bytes:
    """Returns an input of several parts: a line, then each part after its length."""
    return head.encode() + b"\n" + b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def unframed(data: bytes) -> tuple[str, list[bytes]]:
    """Returns the line and the parts of an input; a part that is cut short is as it is."""
    line, _, rest = data.partition(b"\n")
    parts = []
    while len(rest) >= 4:
        size = int.from_bytes(rest[:4], "big")
        parts.append(rest[4 : 4 + size])
        rest = rest[4 + size :]
    return line.decode("latin-1"), parts
