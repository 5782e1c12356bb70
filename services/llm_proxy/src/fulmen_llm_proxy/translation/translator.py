"""The interface of translators."""

from __future__ import annotations

from typing import Final, Protocol

from fulmen.errors import ArgumentInvalid
from fulmen_llm_proxy.apis.api import ApiName
from fulmen_llm_proxy.apis.collected import Asked, Fields

MAX_REPORTED: Final = 50
MAX_CHARACTERS: Final = 300
"""Of one violation, which may quote the request."""


class Translator(Protocol):
    """Translates a call from the caller's API to the backend's, and the answer back.

    One object per try, used by one task, in this order: `request`, then `whole`, or for a stream `event` with each
    event of the backend and `end` after the last one.

    Attributes:
        asked: optional parts that it needs of the backend's answer.
        unsupported: what of the request the backend's API cannot express.
    """

    asked: Asked
    unsupported: UnsupportedFields

    def request(self, fields: Fields) -> Fields:
        """Returns the request in the backend's API; `model` and `stream` exist in both.

        Raises:
            ArgumentInvalid: if fields are invalid or cannot be expressed in the backend's API; names all of them.
        """
        ...

    def whole(self, body: bytes) -> bytes:
        """Returns the backend's answer in the caller's API.

        Raises:
            BackendUnavailable: if it is not an answer of the backend's API.
        """
        ...

    def event(self, event: bytes) -> list[bytes]:
        """Returns the caller's events, with terminators, for an event of the backend.

        Raises:
            BackendUnavailable: if it is not an event of the backend's API.
        """
        ...

    def end(self) -> list[bytes]:
        """Returns the events that end the caller's stream.

        Raises:
            BackendUnavailable: if the backend's stream ended before its answer did.
        """
        ...


class UnsupportedFields:
    """Collects unsupported fields, to report all of them together.

    Parameters may be dropped instead. Messages are never dropped: the answer would be to a different conversation.

    Attributes:
        drops: whether parameters are dropped.
        dropped: names of the parameters that were dropped.
    """

    __slots__ = ("_api", "_found", "_unlisted", "dropped", "drops")

    def __init__(self, api: ApiName, *, drops: bool) -> None:
        """Sets the backend's API, and whether parameters are dropped."""
        self._api = api
        self.drops = drops
        self._found: list[str] = []
        self._unlisted = 0
        self.dropped: list[str] = []

    def add(self, what: str) -> None:
        """Adds a violation, with its position in the request; beyond `MAX_REPORTED` they are counted only."""
        if len(self._found) < MAX_REPORTED:
            self._found.append(what[:MAX_CHARACTERS])
        else:
            self._unlisted += 1

    def param(self, name: str, what: str = "") -> None:
        """Adds a parameter, which is a violation unless parameters are dropped.

        Args:
            what: what of it is not supported; empty for all of it.
        """
        if not self.drops:
            self.add(what or name)
        elif name not in self.dropped:
            self.dropped.append(name)

    def check(self) -> None:
        """Checks that nothing was added.

        Raises:
            ArgumentInvalid: if any was added; names `MAX_REPORTED` of them at most.
        """
        if self._found:
            more = f"; and {self._unlisted} more" if self._unlisted else ""
            raise ArgumentInvalid(
                f"Not supported by {self._api}, the API of the model's backend: {'; '.join(self._found)}{more}."
            )
