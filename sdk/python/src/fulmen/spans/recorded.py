"""The form in which spans record an agent's values: bounded, and without the attempt key.

Invariant: recording takes bounded time and memory, and runs no code of the value; the caller learns whether something
was omitted.
"""

import json
import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, Final

from fulmen.agent import current

__all__ = ["MAX_CONTENT_CHARS", "MASKED", "cut", "json_text", "kind_of", "plain_attributes"]

MAX_CONTENT_CHARS: Final = 8192
"""Maximum length of a text in a span."""

MAX_ITEMS: Final = 256
MAX_DEPTH: Final = 8
MAX_ATTRIBUTES: Final = 64
MAX_KEY_CHARS: Final = 128
MAX_INTEGER_BITS: Final = 1024
MASKED: Final = "[masked]"

_KEY_VARIABLE: Final = "OPENAI_API_KEY"
_SHORTEST_SECRET: Final = 16

Plain = str | bool | int | float


def cut(text: str) -> tuple[str, bool]:
    """Returns a text without the attempt key, truncated to `MAX_CONTENT_CHARS`; and whether it was truncated."""
    kept = _start_of(text, MAX_CONTENT_CHARS, _attempt_key())
    return kept, len(text) > MAX_CONTENT_CHARS


def json_text(value: object) -> tuple[str, bool]:
    """Returns a value as JSON without its long parts; and whether anything was omitted.

    Objects that JSON cannot represent are replaced by the names of their types.
    """
    bounded = _Bounded()
    text = json.dumps(bounded.of(value), ensure_ascii=False)
    kept, was_cut = cut(text)
    return kept, was_cut or bounded.cut


def kind_of(value: object) -> str:
    """Returns the dotted name of a value's type."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def plain_attributes(attributes: Mapping[str, object]) -> tuple[dict[str, Plain], bool]:
    """Returns attributes in a form that spans allow, at most `MAX_ATTRIBUTES`; and whether anything was omitted.

    Numbers and booleans are unchanged, texts are truncated, other values become JSON.
    """
    plain: dict[str, Plain] = {}
    incomplete = len(attributes) > MAX_ATTRIBUTES
    for key, value in islice(attributes.items(), MAX_ATTRIBUTES):
        name = str(key)[:MAX_KEY_CHARS]
        if isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 2**63):
            plain[name] = value
            continue
        plain[name], was_cut = cut(value) if isinstance(value, str) else json_text(value)
        incomplete = incomplete or was_cut
    return plain, incomplete


class _Bounded:
    """Copies a value in JSON types, within a budget of characters."""

    def __init__(self) -> None:
        self.cut = False
        self._left = MAX_CONTENT_CHARS
        self._secret = _attempt_key()

    def of(self, value: object, depth: int = 0) -> object:
        self._left -= 2
        if value is None or isinstance(value, (bool, int, float)):
            return self._number(value)
        if isinstance(value, str):
            return self._text(value)
        if isinstance(value, (bytes, bytearray)):
            return f"{len(value)} bytes"
        members = _members(value)
        if members is None:
            return kind_of(value)
        if depth == MAX_DEPTH or self._left <= 0:
            self.cut = True
            return kind_of(value)
        if isinstance(members, dict):
            pairs = self._some(list(islice(members.items(), MAX_ITEMS + 1)))
            return {self._text(_key(key)): self.of(item, depth + 1) for key, item in pairs}
        return [self.of(item, depth + 1) for item in self._some(list(islice(members, MAX_ITEMS + 1)))]

    def _some(self, items: list[Any]) -> Iterator[Any]:
        for count, item in enumerate(items):
            if count == MAX_ITEMS or self._left <= 0:
                self.cut = True
                return
            yield item

    def _text(self, text: str) -> str:
        kept = _start_of(text, max(0, self._left), self._secret)
        self.cut = self.cut or len(text) > max(0, self._left)
        self._left -= len(kept)
        return kept

    def _number(self, value: bool | int | float | None) -> object:
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else str(float(value))
        if value is None or isinstance(value, bool):
            return value
        # Python does not convert integers of more than 4300 digits to text.
        return int(value) if value.bit_length() <= MAX_INTEGER_BITS else f"integer of {value.bit_length()} bits"


def _members(value: object) -> "dict[Any, Any] | Collection[Any] | None":
    """Returns the members of a value, None if unknown; runs none of its code except a dataclass's properties."""
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in fields(value) if field.repr}
    if hasattr(type(value), "__pydantic_fields__"):
        return dict(vars(value))
    return None


def _key(key: object) -> str:
    return str(key) if isinstance(key, (str, int, float)) else kind_of(key)


def _start_of(text: str, limit: int, secret: str) -> str:
    """Returns the start of a text without a secret, even one that the limit would split."""
    kept = text[: limit + len(secret)]
    if secret:
        kept = kept.replace(secret, MASKED)
    if len(text) > limit:
        kept = kept[: max(0, len(kept) - len(secret))][:limit]
    # Lone surrogates cannot be encoded.
    return kept.encode(errors="replace").decode()


def _attempt_key() -> str:
    context = current()
    environment = os.environ if context is None else context.environment
    key = environment.get(_KEY_VARIABLE, "")
    return key if len(key) >= _SHORTEST_SECRET else ""
