"""What a translator is."""

from __future__ import annotations

from typing import Protocol

from fulmen.errors import ArgumentInvalid
from fulmen_llm_proxy.apis.api import ApiName
from fulmen_llm_proxy.apis.collected import Asked, Fields


class Translator(Protocol):
    """Turns one call from the caller's API into the backend's, and the answer back.

    One object per try, used by one task, in this order: `request`, then `whole` or `refusal`, or
    for a stream `event` with each event of the backend and `end` after the last one.

    Attributes:
        asked: what it needs of the backend's answer, beyond the answer itself.
    """

    asked: Asked

    def request(self, fields: Fields) -> Fields:
        """Returns the request in the backend's API; `model` and `stream` are there in both.

        Raises:
            ArgumentInvalid: if the request has a wrong type, or holds what the backend's API cannot say;
                names every such field.
        """
        ...

    def whole(self, body: bytes) -> bytes:
        """Returns the backend's answer in the caller's API.

        Raises:
            BackendUnavailable: if it is not an answer of the backend's API.
        """
        ...

    def event(self, event: bytes) -> list[bytes]:
        """Returns the caller's events, with terminators, for one event of the backend.

        Raises:
            BackendUnavailable: if it is not an event of the backend's API.
        """
        ...

    def end(self) -> list[bytes]:
        """Returns the events that close the caller's stream.

        Raises:
            BackendUnavailable: if the backend's stream ended before its answer did.
        """
        ...


class Unsayable:
    """Collects what cannot be translated, so that the caller learns of everything at once."""

    __slots__ = ("_api", "_found")

    def __init__(self, api: ApiName) -> None:
        """Takes the backend's API."""
        self._api = api
        self._found: list[str] = []

    def add(self, place: str, why: str) -> None:
        """Notes one thing, by its place in the request."""
        self._found.append(f"{place} ({why})")

    def check(self) -> None:
        """Does nothing if all could be said.

        Raises:
            ArgumentInvalid: naming everything that was noted.
        """
        if self._found:
            raise ArgumentInvalid(
                f"The model's backend is called by another API, {self._api}, which cannot say: "
                f"{'; '.join(self._found)}."
            )
