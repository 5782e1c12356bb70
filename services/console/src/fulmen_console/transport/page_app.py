"""Serves the pages: files that tools build from `web/` into `page/`. Every address that names no file is a page's."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from fulmen_service_kit.http.wire import Header, Scope, Send, header, respond

__all__ = ["PageApp"]

_TYPES: Final = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
}
_ASSETS: Final = "assets/"
_HTML: Final = "index.html"
_BASE: Final = b'<base href="/" />'

# Scripts and styles are loaded only from here; no page of another site may show this one; text never becomes HTML but
# where Svelte's own templates do (Trusted Types).
_POLICY: Final = b"; ".join(
    (
        b"default-src 'none'",
        b"script-src 'self'",
        b"style-src 'self'",
        b"img-src 'self'",
        b"connect-src 'self'",
        b"base-uri 'self'",
        b"form-action 'none'",
        b"frame-ancestors 'none'",
        b"require-trusted-types-for 'script'",
        b"trusted-types svelte-trusted-html",
    )
)
_HTML_HEADERS: Final[tuple[Header, ...]] = (
    (b"content-security-policy", _POLICY),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
)


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    zipped: bytes
    content_type: bytes
    headers: tuple[Header, ...]


class PageApp:
    """Answers GET requests that are for no rpc."""

    def __init__(self, path_prefix: str, *, folder: Traversable | None = None) -> None:
        """Reads the files.

        Args:
            path_prefix: Path that a reverse proxy serves the console under.
            folder: Folder of the files; by default the package's.
        """
        base = _BASE.replace(b"/", f"{path_prefix}/".encode(), 1)
        self._files = dict(_read(folder or files("fulmen_console").joinpath("page"), "", base))

    def has(self, scope: Scope) -> bool:
        """True if a request is for a file, or for a page that a browser shows."""
        if scope["method"] not in ("GET", "HEAD"):
            return False
        name = scope["path"].removeprefix("/")
        return name in self._files or (b"text/html" in header(scope, b"accept") and not name.startswith(_ASSETS))

    async def __call__(self, scope: Scope, send: Send) -> None:
        """Sends the file of a request."""
        found = self._files.get(scope["path"].removeprefix("/")) or self._files[_HTML]
        is_zipped = b"gzip" in header(scope, b"accept-encoding") and len(found.zipped) < len(found.body)
        body = found.zipped if is_zipped else found.body
        extra: list[Header] = [*found.headers, (b"vary", b"accept-encoding")]
        if is_zipped:
            extra.append((b"content-encoding", b"gzip"))
        await respond(send, 200, b"" if scope["method"] == "HEAD" else body, found.content_type, extra=extra)


def _read(folder: Traversable, path: str, base: bytes) -> list[tuple[str, _File]]:
    found: list[tuple[str, _File]] = []
    for each in folder.iterdir():
        name = f"{path}{each.name}"
        if each.is_dir():
            found += _read(each, f"{name}/", base)
            continue
        body = each.read_bytes()
        headers = _HTML_HEADERS if name == _HTML else ((b"cache-control", _caching(name)),)
        if name == _HTML:
            body = body.replace(_BASE, base)
        kind = _TYPES.get(name.rpartition(".")[2], b"application/octet-stream")
        # mtime 0: the same file has the same bytes on all replicas.
        found.append((name, _File(body, gzip.compress(body, mtime=0), kind, headers)))
    return found


def _caching(name: str) -> bytes:
    """Files of `assets/` have a hash of their content in their names."""
    return b"public, max-age=31536000, immutable" if name.startswith(_ASSETS) else b"no-cache"
