"""Asks backends for responses that they keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlencode

import aiohttp

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.domain.headers import Header, to_caller
from fulmen_llm_proxy.domain.routing import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAnswer:
    """What a backend said."""

    status: int
    body: bytes
    content_type: bytes
    headers: list[Header]


class KeptResponsesClient:
    """Reads, deletes and cancels responses at the backends that keep them. One try each: callers ask again."""

    def __init__(self, *, session: aiohttp.ClientSession, keys: Mapping[str, str], max_answer_bytes: int) -> None:
        """Takes the connections' pool, the API keys by name, and the size of the largest answer."""
        self._session = session
        self._keys = keys
        self._max_answer_bytes = max_answer_bytes

    async def ask(
        self, backend: Backend, *, method: str, raw_id: str, action: str = "", query: tuple[tuple[str, str], ...] = ()
    ) -> KeptAnswer:
        """Returns the backend's answer.

        Args:
            raw_id: the response's id there.
            action: below the response, such as `cancel`; empty for the response itself.

        Raises:
            BackendUnavailable: if it cannot be reached, or its answer is too large.
        """
        try:
            async with self._session.request(
                method,
                _address(backend, raw_id, action, query),
                headers=self._headers(backend),
                allow_redirects=False,
            ) as response:
                body = bytearray()
                async for chunk in response.content.iter_any():
                    body += chunk
                    if len(body) > self._max_answer_bytes:
                        raise _unavailable(backend, f"answered with more than {self._max_answer_bytes} bytes")
                return KeptAnswer(
                    status=response.status,
                    body=bytes(body),
                    content_type=response.headers.get("Content-Type", "application/json").encode("latin-1"),
                    headers=list(to_caller(response.raw_headers)),
                )
        except (aiohttp.ClientError, TimeoutError) as error:
            # The kind of the error is told, its text is not: it may hold addresses.
            raise _unavailable(backend, f"cannot be reached ({type(error).__name__})") from error

    def _headers(self, backend: Backend) -> dict[str, str]:
        if not backend.key_name:
            return {}
        key = self._keys.get(backend.key_name)
        if key is None:
            raise _unavailable(backend, f"needs the key '{backend.key_name}', which the proxy does not have")
        return {"api-key": key} if backend.azure else {"Authorization": f"Bearer {key}"}


def _address(backend: Backend, raw_id: str, action: str, query: tuple[tuple[str, str], ...]) -> str:
    root = f"{backend.base_url}/openai" if backend.azure else backend.base_url
    version = (("api-version", backend.api_version),) if backend.azure else ()
    asked = urlencode((*query, *version))
    path = f"{root}/responses/{quote(raw_id, safe='')}" + (f"/{action}" if action else "")
    return f"{path}?{asked}" if asked else path


def _unavailable(backend: Backend, what: str) -> BackendUnavailable:
    return BackendUnavailable(f"The backend '{backend.id}' {what}.", backend=f"backends/{backend.id}")
