"""Checkers of guards: Python functions of installed packages, and webhooks."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable
from importlib.metadata import entry_points
from typing import Any, Final

import aiohttp
import msgspec

GROUP: Final = "fulmen.llm_proxy.guards"
"""Group of entry points: async functions of the document, as a dict, that return a refusal or None."""

_MAX_ANSWER_BYTES: Final = 64 * 1024
_OK: Final = 200


class FunctionChecker:
    """Asks a Python function. It runs in the proxy's event loop, so it must not block."""

    def __init__(self, function: Callable[[dict[str, Any]], Awaitable[str | None]]) -> None:
        self._function = function

    @classmethod
    def load(cls, name: str) -> FunctionChecker:
        """Loads an entry point.

        Raises:
            ValueError: if there is none of this name, or it is not an async function.
        """
        found = [each for each in entry_points(group=GROUP) if each.name == name]
        if not found:
            raise ValueError(f"no installed package has the entry point {name!r} of the group {GROUP}")
        function = found[0].load()
        if not inspect.iscoroutinefunction(function):
            raise ValueError(f"the entry point {name!r} ({found[0].value}) is not an async function")
        return cls(function)

    async def check(self, document: bytes) -> str | None:
        """Returns why a call is refused; see `Checker`."""
        refusal = await self._function(json.loads(document))
        if refusal is not None and not isinstance(refusal, str):
            raise TypeError(f"a guard must return a string or None, not {type(refusal).__name__}")
        return refusal


class _Verdict(msgspec.Struct):
    allow: bool
    message: str = "no reason given"


class WebhookChecker:
    """Asks a URL: POST with the document; the answer is `{"allow": true}`, or false with a `message`."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url
        self._decoder = msgspec.json.Decoder(_Verdict)

    async def check(self, document: bytes) -> str | None:
        """Returns why a call is refused; see `Checker`."""
        async with self._session.post(self._url, data=document, allow_redirects=False) as response:
            if response.status != _OK:
                raise ValueError(f"status {response.status}")
            body = bytearray()
            async for part in response.content.iter_any():
                body += part
                if len(body) > _MAX_ANSWER_BYTES:
                    raise ValueError(f"more than {_MAX_ANSWER_BYTES} bytes")
        verdict = self._decoder.decode(body)
        return None if verdict.allow else verdict.message
