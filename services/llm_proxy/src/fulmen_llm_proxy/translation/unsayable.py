"""What a request holds and the backend's API cannot say: all of it in one error, each with its place."""

from __future__ import annotations

from fulmen.errors import ArgumentInvalid
from fulmen_llm_proxy.apis.api import ApiName


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
