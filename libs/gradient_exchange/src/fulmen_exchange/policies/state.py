"""Serialisation of policy state: dataclasses of plain values, which a checkpoint stores as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

Value = TypeVar("Value")


class PolicyStateInvalid(Exception):
    """A stored state does not belong to this policy."""


def dump(state: object) -> dict[str, object]:
    """Converts a state to plain values."""
    plain: dict[str, object] = TypeAdapter(type(state)).dump_python(state, mode="json")
    return plain


def load(kind: type[Value], plain: object) -> Value:
    """Reads a state written by `dump`.

    Raises:
        PolicyStateInvalid: if it is of another kind.
    """
    if not isinstance(plain, Mapping):
        raise PolicyStateInvalid(f"{kind.__name__}: missing")
    try:
        # Not `strict`, since JSON has no tuples. Unknown keys are checked here: `forbid` would need a config on each
        # class.
        if unknown := set(plain) - set(getattr(kind, "__dataclass_fields__", ())):
            raise PolicyStateInvalid(f"{kind.__name__}: unknown keys {', '.join(sorted(map(str, unknown)))}")
        return TypeAdapter(kind).validate_python(plain)
    except ValidationError as error:
        where = "; ".join(".".join(map(str, each["loc"])) + f": {each['msg']}" for each in error.errors())
        raise PolicyStateInvalid(f"{kind.__name__}: {where}") from None
