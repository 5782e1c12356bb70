"""The edge of every rpc: authenticates, maps errors, measures, and writes one log line.

Invariant: errors of the catalogue are sent as they are. Any other exception is logged with an id and sent as INTERNAL
with that id; its text never reaches a client.
"""

import asyncio
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message
from opentelemetry import context as otel_context
from opentelemetry import metrics, propagate, trace
from opentelemetry.trace import SpanKind, StatusCode

from fulmen.errors import (
    ArgumentInvalid,
    DeadlineExceeded,
    FulmenError,
    InternalError,
    PermissionDenied,
    Unimplemented,
    Violation,
)
from fulmen.ids import ALL_PROJECTS
from fulmen.rpc.status import CLOCK_METADATA_KEY, STATUS_METADATA_KEY, encode, grpc_code
from fulmen_service_kit.observability.logs import places_of
from fulmen_service_kit.rpc.moments import moment_problems
from fulmen_service_kit.rpc.reads import Read
from fulmen_service_kit.rpc.unread import UnreadLimit
from fulmen_service_kit.security.audit import AuditLog, fields_of
from fulmen_service_kit.security.auth import SEVERAL, Authenticator, set_caller
from fulmen_service_kit.security.permissions import SELF_CHECKING, rule
from fulmen_service_kit.security.project_limits import ProjectLimits, ProjectShare
from fulmen_service_kit.security.tokens import Caller, Role

AUTHORIZATION = "authorization"
HEALTH = "/grpc.health."
OPEN_BODY_LIMIT_S = 10.0
"""Time for the request of a caller whom no token names to arrive: nothing else bounds how many there are."""
_log = structlog.get_logger()
_END = object()
_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
# Logged at debug level.
_QUIET = (HEALTH, "/grpc.reflection.")


class RpcEdge(grpc.aio.ServerInterceptor):
    """Wraps every handler of a server."""

    def __init__(
        self,
        authenticator: Authenticator,
        *,
        write_timeout_s: float,
        log_error_texts: bool = True,
        audit: AuditLog | None = None,
        mutual_tls: bool = False,
        limits: ProjectLimits | None = None,
    ) -> None:
        """Initializes the edge.

        Args:
            authenticator: Authenticates and authorizes callers.
            write_timeout_s: Time for which a message of a stream may wait for its caller to take it, in seconds.
            log_error_texts: Whether texts of unexpected errors are logged; False where they may contain prompts.
            audit: Log of administrative calls; None for standard error.
            mutual_tls: Whether all callers but agents must present a certificate.
            limits: Limits of each project; None for none.
        """
        self._write_timeout_s = write_timeout_s
        self._limits = ProjectLimits() if limits is None else limits
        self._mutual_tls = mutual_tls
        self._authenticator = authenticator
        self._audit = AuditLog() if audit is None else audit
        self._log_error_texts = log_error_texts
        self._tracer = trace.get_tracer("fulmen.rpc")
        self._duration = metrics.get_meter("fulmen.rpc").create_histogram(
            "rpc.server.duration",
            unit="s",
            description="Duration of rpcs by method and code.",
            # OpenTelemetry's default bounds are for milliseconds.
            explicit_bucket_boundaries_advisory=_BOUNDS_S,
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Returns the handler, wrapped."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return self._wrap(
            handler, handler_call_details.method, _headers(handler_call_details.invocation_metadata or ())
        )

    def _wrap(self, handler: Any, rpc: str, metadata: dict[str, str]) -> grpc.RpcMethodHandler:
        # gRPC would read a single request before its handler is called: here it is read once its caller is admitted.
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            make, handle = grpc.stream_stream_rpc_method_handler, self._streaming
        else:
            inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
            make, handle = grpc.stream_unary_rpc_method_handler, self._unary
        traffic = _Traffic(handler, is_stream=handler.request_streaming or handler.response_streaming)
        return make(handle(inner, rpc, metadata, traffic), traffic.read, traffic.write)

    def _unary(
        self, inner: Callable[..., Awaitable[Any]], rpc: str, metadata: dict[str, str], traffic: "_Traffic"
    ) -> Any:
        async def answer(call: _Call, request: Any, context: grpc.aio.ServicerContext) -> Any:
            return await inner(call.checked(request), context)

        async def handle(requests: Any, context: grpc.aio.ServicerContext) -> Any:
            call = _Call(self, rpc, metadata, traffic)
            try:
                await call.begin(context)
                request = await call.received(requests, context)
                response = await traffic.timed(answer(call, request, context))
            except BaseException as error:
                await call.fail(error, context)
                raise
            call.end("OK")
            return response

        return handle

    def _streaming(self, inner: Callable[..., Any], rpc: str, metadata: dict[str, str], traffic: "_Traffic") -> Any:
        async def handle(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            call = _Call(self, rpc, metadata, traffic)
            try:
                await call.begin(context)
                messages = call.checked(await call.received(requests, context))
                answer = inner(messages, context)
                if inspect.isasyncgen(answer):
                    unread = UnreadLimit(answer, limit_s=self._write_timeout_s)
                    try:
                        while (response := await traffic.timed(anext(answer, _END))) is not _END:
                            await call.check()
                            unread.offer()
                            yield response
                            unread.taken()
                    finally:
                        unread.close()
                else:
                    await traffic.timed(answer)
            except BaseException as error:
                await call.fail(error, context)
                raise
            call.end("OK")

        return handle


class _Traffic:
    """What one rpc sends and receives, charged to its project."""

    __slots__ = ("_deserialize", "_serialize", "is_single", "is_stream", "share")

    def __init__(self, handler: Any, *, is_stream: bool) -> None:
        self._deserialize, self._serialize = handler.request_deserializer, handler.response_serializer
        self.is_single = not handler.request_streaming
        self.is_stream = is_stream
        self.share: ProjectShare | None = None

    def read(self, payload: bytes) -> Any:
        """Reads a request: counts it, and decodes a message of a stream."""
        if self.share is not None:
            self.share.charge(len(payload), messages=not self.is_single)
        # A single request is decoded within the time that its project is charged for.
        return payload if self.is_single else self.decode(payload)

    def decode(self, payload: Any) -> Any:
        """Decodes a request; returns a placeholder for one that cannot be decoded."""
        try:
            return payload if self._deserialize is None else self._deserialize(payload)
        except DecodeError:
            return _Unreadable()

    def write(self, message: Any) -> bytes:
        """Encodes a response."""
        payload: bytes = message if self._serialize is None else self._serialize(message)
        if self.share is not None:
            self.share.charge(len(payload), messages=self.is_stream)
        return payload

    def timed(self, work: Awaitable[Any]) -> Awaitable[Any]:
        """Returns an awaitable that charges the project for the time of the event loop."""
        return work if self.share is None else self.share.timed(work)

    def end(self, _: object) -> None:
        """Ends the project's open call."""
        if self.share is not None:
            self.share.end(is_stream=self.is_stream)


class _Call:
    """One rpc, from its start to its log line."""

    def __init__(self, edge: RpcEdge, rpc: str, metadata: dict[str, str], traffic: _Traffic) -> None:
        self._traffic = traffic
        self._edge = edge
        self._rpc = rpc
        self._metadata = metadata
        self._started = time.perf_counter()
        self._subject = ""
        self._caller: Caller | None = None
        self._rule = rule(rpc)
        self._audited = self._rule.audited
        self._asked: Any = None
        self._span = edge._tracer.start_span(rpc.lstrip("/"), context=propagate.extract(metadata), kind=SpanKind.SERVER)

    async def begin(self, context: grpc.aio.ServicerContext) -> None:
        """Authenticates and authorizes the caller.

        Raises:
            FulmenError: If the call is rejected.
        """
        task = asyncio.current_task()
        if task is not None:
            task.set_name(self._rpc)  # read by the watchdog of the loop
        if self._span.get_span_context().is_valid:
            # Never detached: the context ends with the rpc.
            otel_context.attach(trace.set_span_in_context(self._span))
        if self._rpc.startswith(HEALTH):
            context.set_trailing_metadata(((CLOCK_METADATA_KEY, str(time.time_ns())),))
        authorization = self._metadata.get(AUTHORIZATION, "")
        caller = await self._edge._authenticator.admit(self._rpc, authorization, address_of(context.peer()))
        if self._edge._mutual_tls and (caller is not None or self._rpc in SELF_CHECKING):
            require_certificate(caller, context.auth_context())
        if caller is not None:
            self._caller = caller
            self._subject = f"{caller.role}:{caller.subject}"
            # First: a call that is not allowed costs as much, and may be audited.
            traffic = self._traffic
            share = await self._edge._limits.admit(
                caller,
                is_stream=traffic.is_stream,
                is_counted=not self._rule.is_bulk,
            )
            traffic.share = share
            # Until the answer has been taken: one that waits for its caller is an open call, too.
            context.add_done_callback(traffic.end)
            try:
                self._edge._authenticator.authorize(self._rpc, caller)
            except PermissionDenied:
                if caller.project != ALL_PROJECTS:
                    await self._edge._limits.refusals.hold(caller.project)
                raise
            set_caller(caller)

    async def check(self) -> None:
        """Checks before each message of a stream that the token is still valid, and waits for its project's turn.

        Raises:
            TokenInvalid: If it was revoked.
            Unavailable: If it has expired, or its key was removed.
        """
        if self._caller is not None:
            self._edge._authenticator.check(self._caller)
        if self._traffic.share is not None:
            await self._traffic.share.pace()

    async def received(self, requests: Any, context: grpc.aio.ServicerContext) -> Any:
        """Returns the request, as bytes, of an rpc that has one; otherwise the stream of requests.

        Raises:
            ArgumentInvalid: If there is none.
            DeadlineExceeded: If no token names the caller, and it does not arrive in time.
        """
        if not self._traffic.is_single:
            return requests
        try:
            async with asyncio.timeout(None if self._caller is not None else OPEN_BODY_LIMIT_S):
                request = await Read(context.read())
        except TimeoutError:
            raise DeadlineExceeded(f"The request did not arrive within {OPEN_BODY_LIMIT_S:g} s.") from None
        if request is grpc.aio.EOF:
            raise ArgumentInvalid("The call has no message.")
        return request

    def checked(self, request: Any) -> Any:
        """Returns a request unchanged, or a stream of requests with a check before each message.

        Raises:
            ArgumentInvalid: If the request cannot be decoded.
        """
        if hasattr(request, "__anext__"):
            return _Checked(request, self)
        request = self._traffic.decode(request)
        if self._audited is not None:
            self._asked = request
        return _readable(request)

    async def fail(self, error: BaseException, context: grpc.aio.ServicerContext) -> None:
        """Aborts the rpc with the status of an error; returns only for a cancellation or a pending abort."""
        if isinstance(error, asyncio.CancelledError | GeneratorExit):
            self.end("CANCELLED")
            return
        if isinstance(error, grpc.aio.AbortError):
            self.end("ABORTED")
            return
        if isinstance(error, NotImplementedError):
            known: FulmenError = Unimplemented(f"{self._rpc} is not implemented by this server.")
        elif isinstance(error, FulmenError):
            known = error
        else:
            error_id = uuid.uuid4().hex[:12]
            known = InternalError(f"Internal error. Quote id {error_id}.", error_id=error_id)
            details = {"exc_info": error} if self._edge._log_error_texts else {"error": places_of(error)}
            _log.error("rpc_failed_unexpectedly", rpc=self._rpc, error_id=error_id, **details)
        self.end(known.code.value, reason=known.reason)
        status = encode(known)
        await context.abort(grpc_code(known.code), status.message, ((STATUS_METADATA_KEY, status.SerializeToString()),))

    def end(self, code: str, *, reason: str = "") -> None:
        """Measures and logs the rpc."""
        seconds = time.perf_counter() - self._started
        self._edge._duration.record(seconds, {"rpc.method": self._rpc, "rpc.code": code})
        if code not in ("OK", "CANCELLED"):
            self._span.set_status(StatusCode.ERROR, reason)
        self._span.end()
        quiet = self._rpc.startswith(_QUIET) or code in ("OK", "CANCELLED")
        write = _log.debug if quiet else _log.info
        write("rpc", rpc=self._rpc, code=code, reason=reason, duration_s=round(seconds, 6), caller=self._subject)
        if self._audited is not None:
            self._edge._audit(
                rpc=self._rpc,
                code=code,
                reason=reason,
                caller=self._caller,
                asked=fields_of(self._asked, self._audited),
            )


def _headers(metadata: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Returns headers by name; of several with one name the last, except that several authorizations are none."""
    pairs = list(metadata)
    headers = dict(pairs)
    if len(headers) < len(pairs) and sum(name == AUTHORIZATION for name, _ in pairs) > 1:
        headers[AUTHORIZATION] = SEVERAL
    return headers


class _Checked:
    """A stream of requests that raises once its caller's token is revoked."""

    def __init__(self, messages: Any, call: _Call) -> None:
        self._messages = messages
        self._call = call

    def __aiter__(self) -> "_Checked":
        return self

    async def __anext__(self) -> Any:
        message = await Read(self._messages.__anext__())
        await self._call.check()
        return _readable(message)


class _Unreadable:
    """Placeholder for a message that could not be decoded; gRPC would send its internal error text."""


def require_certificate(caller: Caller | None, connection: Mapping[str, Any]) -> None:
    """Checks that a caller other than an agent has presented a certificate, which gRPC has verified.

    Args:
        caller: The caller; None if the servicer has yet to read its token from the request.
        connection: gRPC's properties of the connection; the service's own Unix socket has no TLS.

    Raises:
        PermissionDenied: If it has not.
    """
    is_tls = connection.get("transport_security_type") in (b"ssl", [b"ssl"])
    is_agent = caller is not None and caller.role is Role.ATTEMPT
    if is_tls and not is_agent and "x509_pem_cert" not in connection:
        raise PermissionDenied("client certificate is required. This port is for agents; use the mTLS port.")


def address_of(peer: str) -> str:
    """Returns the host of gRPC's `ipv4:10.0.0.7:4711`; all peers of a Unix socket count as one."""
    return peer.partition(":")[2].rpartition(":")[0] if peer.startswith("ip") else peer


def _readable(message: Any) -> Any:
    if isinstance(message, _Unreadable):
        problem = Violation(field="", description="not a message of this rpc")
        raise ArgumentInvalid("request cannot be decoded", violations=[problem])
    if isinstance(message, Message) and (problems := moment_problems(message)):
        raise ArgumentInvalid("The request is malformed.", violations=problems)
    return message
