"""Addresses and keys of backends, and the errors that callers see when backends fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from urllib.parse import quote, urlencode

import aiohttp
import yarl

from fulmen.errors import BackendUnavailable
from fulmen_llm_proxy.apis.api import Dialect
from fulmen_llm_proxy.routing.table import Backend
from fulmen_llm_proxy.settings import BackendKey

_OF_A_DEPLOYMENT = frozenset({"/chat/completions", "/completions", "/embeddings"})
"""APIs whose Azure-style addresses contain the deployment; elsewhere the body names the model."""

_ANSWERED = 200
_REFUSED, _NO_STATUS = 400, 600
_PLAIN = frozenset({"", "identity"})
_JSON = "application/json"


class BackendKeys:
    """The proxy's own keys for backends, by `key_name`.

    Invariant: a key is sent to the hosts of its entry only, whatever address a backend names.
    """

    def __init__(
        self, configured: Mapping[str, BackendKey], *, defaults: Mapping[str, BackendKey] = MappingProxyType({})
    ) -> None:
        """Creates the keys.

        Args:
            configured: Keys of the settings, which win.
            defaults: Keys that count where neither the settings nor the store has one.
        """
        self._configured = configured
        self._stored: Mapping[str, BackendKey] = {}
        self._defaults = defaults

    def replace_configured(self, keys: Mapping[str, BackendKey]) -> None:
        """Replaces the keys of the settings."""
        self._configured = keys

    def replace_stored(self, keys: Mapping[str, BackendKey]) -> None:
        """Replaces the keys that the store keeps."""
        self._stored = keys

    def headers(self, backend: Backend) -> dict[str, str]:
        """Returns the headers that the operator sends to a backend: its own, and its key.

        Raises:
            BackendUnavailable: see `key`.
        """
        headers, key = dict(backend.headers), self.key(backend)
        if not key:
            return headers
        if backend.dialect is Dialect.ANTHROPIC:
            return headers | {"x-api-key": key}
        return headers | ({"api-key": key} if backend.azure else {"Authorization": f"Bearer {key}"})

    def key(self, backend: Backend) -> str:
        """Returns the key of a backend; empty if it needs none.

        Raises:
            BackendUnavailable: if the proxy does not have the key, or may not send it to the backend's host.
        """
        if not backend.key_name:
            return ""
        name = backend.key_name
        entry = self._configured.get(name) or self._stored.get(name) or self._defaults.get(name)
        if entry is None:
            raise unavailable(
                backend.id, f"needs key '{name}', which is not configured: run `fulmen secret set {name}`"
            )
        if not _is_among(backend.base_url, entry.hosts):
            text = f"is on a host to which key '{name}' may not be sent; add the host to the key's `hosts`"
            raise unavailable(backend.id, text)
        return entry.key.get_secret_value()


def _is_among(url: str, hosts: Sequence[str]) -> bool:
    """Returns True if the host of a URL, with or without its port, matches one of `hosts`."""
    try:
        # The client's own parser, so that both see the same host; raw, since decoded names may look like others.
        parts = yarl.URL(url)
        host = (parts.raw_host or "").lower().rstrip(".")
    except ValueError:
        return False
    return any(fnmatchcase(found, pattern.lower()) for pattern in hosts for found in (host, f"{host}:{parts.port}"))


def address(backend: Backend, path: str, *, model: str = "", query: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the URL at which a backend serves a path, such as `/chat/completions`.

    Args:
        model: the backend's name of the model; part of some Azure-style URLs.
        query: names and values, unescaped.

    Raises:
        BackendUnavailable: if the proxy does not call it itself.
    """
    if backend.provider:
        raise unavailable(backend.id, "is called through LiteLLM, which does not forward other paths")
    root = backend.base_url
    if backend.azure:
        root += f"/openai/deployments/{quote(model, safe='')}" if path in _OF_A_DEPLOYMENT else "/openai"
        query = (*query, ("api-version", backend.api_version))
    return f"{root}{path}?{urlencode(query)}" if query else root + path


def content_type_of(response: aiohttp.ClientResponse) -> str:
    """Returns the content type of a response; JSON if it has none that can be passed on."""
    content_type = response.headers.get("Content-Type", _JSON)
    return content_type if content_type.isascii() else _JSON


def is_encoded(response: aiohttp.ClientResponse) -> bool:
    """Returns whether a body is compressed although `identity` was requested; it cannot be read here."""
    return response.headers.get("Content-Encoding", "").lower() not in _PLAIN


def require_answer(response: aiohttp.ClientResponse, backend_id: str, *, encoded: bool) -> None:
    """Checks that a response is an answer or an error; redirects are never followed.

    Raises:
        BackendUnavailable: if it is neither, or an answer that is `encoded`.
    """
    if response.status == _ANSWERED:
        if encoded:
            raise unavailable(backend_id, "sent a compressed answer although `identity` was requested")
    elif not _REFUSED <= response.status < _NO_STATUS:
        raise unavailable(backend_id, f"answered with unexpected status {response.status}")


async def read_whole(response: aiohttp.ClientResponse, backend_id: str, max_bytes: int) -> bytes:
    """Reads a body to its end; the caller sets the deadline and closes the response.

    Raises:
        BackendUnavailable: if it exceeds `max_bytes`.
    """
    if response.content_length is not None and response.content_length <= max_bytes:
        return await response.read()
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise unavailable(backend_id, f"answered with more than {max_bytes} bytes")
    return bytes(body)


def unavailable(backend_id: str, what: str, error: Exception | None = None) -> BackendUnavailable:
    """Returns the error for the caller; names an exception's type, never its text, which may contain addresses."""
    kind = "" if error is None else f" ({type(error).__name__})"
    return BackendUnavailable(f"Backend '{backend_id}' {what}{kind}.", backend=f"backends/{backend_id}")
