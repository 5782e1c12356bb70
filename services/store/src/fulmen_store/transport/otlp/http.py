"""OTLP/HTTP: `POST /v1/traces`, protobuf or JSON, optionally gzipped; and `GET /healthz`.

Errors are `google.rpc.Status` in the encoding of the request. Source:
https://opentelemetry.io/docs/specs/otlp/#otlphttp.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
import zlib
from typing import Final

import structlog
from google.protobuf.message import Message

from fulmen.errors import ArgumentInvalid, Code, Draining, FulmenError, InternalError, MessageTooLarge
from fulmen.rpc.status import encode
from fulmen_service_kit.http.wire import (
    CallerGone,
    Header,
    Receive,
    Scope,
    Send,
    client_address,
    header,
    header_count,
    read_body,
    respond,
)
from fulmen_service_kit.security.auth import SEVERAL, Authenticator, set_caller
from fulmen_service_kit.security.project_limits import ProjectLimits
from fulmen_store.database.database import Database
from fulmen_store.transport.otlp.ingest import OtlpIngest

__all__ = ["OtlpHttpApp"]

TRACES: Final = "/v1/traces"
HEALTH: Final = "/healthz"
# Access is checked as for the gRPC endpoint.
RPC: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
PROTOBUF: Final = b"application/x-protobuf"
JSON: Final = b"application/json"
BODY_LIMIT_S: Final = 30.0
DEFAULT_RETRY_AFTER_S: Final = 1.0
# Larger bodies are unpacked in a thread; inline they would block the event loop for longer than a thread costs.
INLINE_GUNZIP_BYTES: Final = 32 * 1024

_METHODS: Final = {TRACES: "POST", HEALTH: "GET"}
_TEXT: Final = b"text/plain; charset=utf-8"
_GZIP_WINDOW: Final = 31
_STATUS: Final = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 503,
}

_log = structlog.get_logger()


class _Refused(Exception):
    """An error specific to HTTP: wrong path, method or encoding."""

    def __init__(self, status: int, message: str, *extra: Header) -> None:
        super().__init__(message)
        self.status = status
        self.extra = extra


class OtlpHttpApp:
    """The ASGI application; the only handler of unexpected exceptions."""

    def __init__(
        self,
        *,
        ingest: OtlpIngest,
        authenticator: Authenticator,
        limits: ProjectLimits,
        max_body_bytes: int,
        database: Database,
    ) -> None:
        """Creates the application.

        Args:
            ingest: Storage of exports.
            authenticator: Authenticator of the gRPC server.
            limits: Limits of each project, of the gRPC server.
            max_body_bytes: Maximum size of a body, compressed and uncompressed, bytes.
            database: Database whose state /healthz reports.
        """
        self._ingest = ingest
        self._authenticator = authenticator
        self._limits = limits
        self._max_body_bytes = max_body_bytes
        self._database = database
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        if scope["type"] != "http":
            return
        started = time.perf_counter()
        as_json = _media_type(scope) == JSON
        reason = ""
        try:
            status = await self._dispatch(scope, receive, send, as_json=as_json)
        except CallerGone:
            return
        except _Refused as refusal:
            status, reason = refusal.status, str(refusal)
            known = FulmenError(str(refusal)) if status >= 500 else ArgumentInvalid(str(refusal))
            await _respond_error(send, status, known, as_json=as_json, extra=refusal.extra)
        except MessageTooLarge as error:
            # The rest of the body is not read, so the connection cannot be reused.
            status, reason = 413, error.reason
            close = (b"connection", b"close")
            await _respond_error(send, status, error, as_json=as_json, extra=(close,), unread=receive)
        except FulmenError as error:
            status, reason = _STATUS.get(error.code, 500), error.reason
            await _respond_error(send, status, error, as_json=as_json)
        except Exception as error:  # noqa: BLE001 - the edge: no text of an unknown error leaves the process
            error_id = uuid.uuid4().hex[:12]
            status, reason = 500, error_id
            _log.error("http_failed_unexpectedly", path=scope["path"], error_id=error_id, exc_info=error)
            unknown = InternalError(f"Internal error. Quote id {error_id}.", error_id=error_id)
            await _respond_error(send, status, unknown, as_json=as_json)
        seconds = round(time.perf_counter() - started, 6)
        write = _log.debug if status < 400 else _log.info
        write("http", path=scope["path"][:64], status=status, reason=reason, duration_s=seconds)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send, *, as_json: bool) -> int:
        path, method, address = scope["path"], scope["method"], client_address(scope)
        expected = _METHODS.get(path)
        if method != expected:
            # Late, as all refusals of callers whom no token names.
            await self._limits.refusals.hold(address)
        if expected is None:
            raise _Refused(404, "Unknown path: use POST /v1/traces or GET /healthz.")
        if method != expected:
            raise _Refused(405, f"{path} supports only {expected}.", (b"allow", expected.encode()))
        if path == HEALTH:
            ready = self._database.is_up and not self.draining
            await respond(send, 200 if ready else 503, b"ok" if ready else b"not serving", _TEXT)
            return 200 if ready else 503
        if self.draining:
            raise Draining("The store is shutting down; retry.")
        authorization = header(scope, b"authorization").decode("latin-1")
        if header_count(scope, b"authorization") > 1:
            authorization = SEVERAL
        caller = await self._authenticator.admit(RPC, authorization, address)
        assert caller is not None  # the rpc is not open
        with await self._limits.admit(caller) as share:
            self._authenticator.authorize(RPC, caller)
            set_caller(caller)
            body = await self._body(scope, receive)
            share.charge(len(body))
            answer = await self._ingest.export(body, as_json=as_json)
        await respond(send, 200, _encoded(answer, as_json=as_json), JSON if as_json else PROTOBUF)
        return 200

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        if _media_type(scope) not in (JSON, PROTOBUF):
            raise _Refused(415, "The content type must be application/x-protobuf or application/json.")
        encoding = header(scope, b"content-encoding").strip().lower()
        if encoding not in (b"", b"identity", b"gzip"):
            raise _Refused(415, "The content encoding must be gzip, or none.", (b"accept-encoding", b"gzip"))
        try:
            async with asyncio.timeout(BODY_LIMIT_S):
                body = await read_body(scope, receive, self._max_body_bytes)
        except TimeoutError:
            raise _Refused(408, "The body was not received in time.", (b"connection", b"close")) from None
        if encoding != b"gzip":
            return body
        if len(body) <= INLINE_GUNZIP_BYTES:
            return _unpacked(body, self._max_body_bytes)
        return await asyncio.to_thread(_unpacked, body, self._max_body_bytes)


def _unpacked(body: bytes, limit_bytes: int) -> bytes:
    """Unpacks gzip up to a limit.

    Raises:
        MessageTooLarge: If the content exceeds the limit.
        ArgumentInvalid: If it is not gzip, or is truncated.
    """
    parts: list[bytes] = []
    size_bytes = 0
    while body:
        unpacker = zlib.decompressobj(_GZIP_WINDOW)
        try:
            part = unpacker.decompress(body, limit_bytes - size_bytes + 1)
        except zlib.error:
            raise ArgumentInvalid("The body is not gzip.") from None
        size_bytes += len(part)
        if size_bytes > limit_bytes:
            raise MessageTooLarge(
                f"The unpacked body exceeds the limit of {limit_bytes} bytes.", limit_bytes=limit_bytes
            )
        if not unpacker.eof:
            raise ArgumentInvalid("The gzip body is truncated.")
        parts.append(part)
        # A gzip file may have several members (RFC 1952, 2.2).
        body = unpacker.unused_data
    return b"".join(parts)


def _media_type(scope: Scope) -> bytes:
    return header(scope, b"content-type").partition(b";")[0].strip().lower()


def _encoded(message: Message, *, as_json: bool) -> bytes:
    if not as_json:
        serialised: bytes = message.SerializeToString()
        return serialised
    from google.protobuf import json_format

    return json_format.MessageToJson(message, indent=None).encode()


async def _respond_error(
    send: Send,
    status: int,
    error: FulmenError,
    *,
    as_json: bool,
    extra: tuple[Header, ...] = (),
    unread: Receive | None = None,
) -> None:
    headers = list(extra)
    if status in (429, 503):
        seconds = DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(seconds))))
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    body = _encoded(encode(error), as_json=as_json)
    await respond(send, status, body, JSON if as_json else PROTOBUF, headers, unread)
