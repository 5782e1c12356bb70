"""How the parts of a policy keep their state: dataclasses of plain values, which a checkpoint stores as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

Value = TypeVar("Value")


class PolicyStateInvalid(Exception):
    """A state is not one of this policy; the text says where."""


def dump(state: object) -> dict[str, object]:
    """Makes plain values of a state."""
    plain: dict[str, object] = TypeAdapter(type(state)).dump_python(state, mode="json")
    return plain


def load(kind: type[Value], plain: object) -> Value:
    """Reads what `dump` has made.

    Raises:
        PolicyStateInvalid: if it is of another kind.
    """
    if not isinstance(plain, Mapping):
        raise PolicyStateInvalid(f"{kind.__name__}: is missing")
    try:
        # Not `strict`: JSON has no tuples. What a key names must be a field, for `forbid` would need a config on each
        # class.
        if unknown := set(plain) - set(getattr(kind, "__dataclass_fields__", ())):
            raise PolicyStateInvalid(f"{kind.__name__}: knows no {', '.join(sorted(map(str, unknown)))}")
        return TypeAdapter(kind).validate_python(plain)
    except ValidationError as error:
        where = "; ".join(".".join(map(str, each["loc"])) + f": {each['msg']}" for each in error.errors())
        raise PolicyStateInvalid(f"{kind.__name__}: {where}") from None
