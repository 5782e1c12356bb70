"""What all records share, and how they are named in arguments."""

from __future__ import annotations

from typing import ClassVar, Generic, Protocol, TypeVar

from google.protobuf.message import Message

__all__ = ["Named", "View", "name_of"]

MessageT_co = TypeVar("MessageT_co", bound=Message, covariant=True)


class View(Generic[MessageT_co]):
    """A message of the services, read through plain attributes.

    Attributes:
        proto: The message. Changing it changes the record, not the service.
    """

    __slots__ = ("proto",)
    _shown: ClassVar[tuple[str, ...]] = ("name",)

    def __init__(self, proto: MessageT_co) -> None:
        """Keeps the message."""
        self.proto = proto

    def __eq__(self, other: object) -> bool:
        """Returns whether the other one is of the same class and has an equal message."""
        return type(other) is type(self) and other.proto == self.proto

    def __hash__(self) -> int:
        """Returns a hash of what `repr` shows."""
        return hash(repr(self))

    def __repr__(self) -> str:
        """Shows the most important attributes."""
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._shown)
        return f"{type(self).__name__}({shown})"


class Named(Protocol):
    """Anything with a resource name, such as a record."""

    @property
    def name(self) -> str:
        """Its resource name."""
        ...


def name_of(given: str | Named) -> str:
    """Returns the name of a record, or the given name."""
    return given if isinstance(given, str) else given.name
