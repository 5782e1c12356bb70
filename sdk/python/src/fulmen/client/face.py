"""The blocking face of the asynchronous client: calls run at home, and their results get blocking faces of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Final

from fulmen.rpc.home import block_on, iterate

__all__ = ["Face", "faced"]

_FACES: Final[dict[type, type[Face]]] = {}


class Face:
    """A blocking view of an asynchronous object."""

    _wraps: type

    def __init_subclass__(cls) -> None:
        """Registers the face of its class."""
        _FACES[cls._wraps] = cls

    def __init__(self, aio: Any) -> None:
        """Keeps the asynchronous object."""
        self._aio = aio

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return faced(block_on(work))

    def _iterate(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        return (faced(each) for each in iterate(items))


def faced(value: Any) -> Any:
    """Returns the blocking face of an asynchronous object, also in a list; other values unchanged."""
    if isinstance(value, list):
        return [faced(each) for each in value]
    face = _FACES.get(type(value))
    return value if face is None else face(value)
