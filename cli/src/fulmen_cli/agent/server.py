"""The model API and the OpenTelemetry collector of a check, on this machine: every call is answered and recorded.

Both run in threads, so that the agent is served while the main thread is at a breakpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Final

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from fulmen_cli.agent.answers import answer_of, error_of, usage_of
from fulmen_cli.agent.models import Answer, Models
from fulmen_cli.agent.recording import FIRST_ERROR_STATUS, CallRecord, Recording, now_ns, trace_of

__all__ = ["Listening", "listening"]

LOOPBACK: Final = "127.0.0.1"
COLLECTOR_THREADS: Final = 4
STOP_GRACE_S: Final = 1.0
MAX_BODY_BYTES: Final = 64 * 1024 * 1024
MAX_SPANS_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where agents find both."""

    models_url: str
    otlp_url: str


@contextmanager
def listening(models: Models, recording: Recording) -> Iterator[Listening]:
    """Serves on free ports of this machine until the body ends."""
    handler = type("_BoundHandler", (_Handler,), {"models": models, "recording": recording})
    http = ThreadingHTTPServer((LOOPBACK, 0), handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, name="model API", daemon=True)
    thread.start()
    collector = grpc.server(
        ThreadPoolExecutor(COLLECTOR_THREADS, thread_name_prefix="collector"),
        options=[("grpc.max_receive_message_length", MAX_SPANS_BYTES)],
    )
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_Collector(recording), collector)
    port = collector.add_insecure_port(f"{LOOPBACK}:0")
    collector.start()
    try:
        yield Listening(models_url=f"http://{LOOPBACK}:{http.server_address[1]}", otlp_url=f"http://{LOOPBACK}:{port}")
    finally:
        http.shutdown()
        http.server_close()
        collector.stop(STOP_GRACE_S).wait(STOP_GRACE_S)


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802  # The contract's name.
        """Keeps spans."""
        scopes = (scope for resource in request.resource_spans for scope in resource.scope_spans)
        self._recording.add_spans([span for scope in scopes for span in scope.spans])
        return trace_service_pb2.ExportTraceServiceResponse()


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection; `models` and `recording` are set on a class made for each check."""

    protocol_version = "HTTP/1.1"
    models: ClassVar[Models]
    recording: ClassVar[Recording]

    def do_GET(self) -> None:  # The base class's name.
        """Answers what has no body, such as the list of models."""
        self._serve(b"")

    def do_POST(self) -> None:  # The base class's name.
        """Answers and records a call."""
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            self.send_error(411 if not length.isdigit() else 413)
            return
        self._serve(self.rfile.read(int(length)))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # The base class's name.
        """Writes nothing: the calls are shown in the end."""

    def _serve(self, body: bytes) -> None:
        rollout = self.recording.rollout_of(_key(dict(self.headers.items())))
        if rollout is None:
            self.recording.add_refused(self.path)
            self._send(401, "application/json", [b'{"error": {"message": "This is not the key of the attempt."}}'])
            return
        started_ns = now_ns()
        try:
            answer = self.models.answer(self.command, self.path, dict(self.headers.items()), body)
            refusal = b"".join(answer.pieces) if answer.status >= FIRST_ERROR_STATUS else b""
        except OSError as error:
            text = f"{self.models.name} cannot be reached: {error}"
            refusal = b'{"error": {"message": "%s"}}' % text.replace('"', "'").encode()
            answer = Answer(status=502, content_type="application/json", pieces=iter(()))

        def ended(content: bytes) -> None:
            if self.command == "POST":
                self._record(rollout, started_ns, body, answer, content)

        if answer.status >= FIRST_ERROR_STATUS:
            # Clients raise an error of the status alone, and the agent may have ended before it would have read the rest.
            ended(refusal)
            self._send(answer.status, answer.content_type, [refusal])
        else:
            self._send(answer.status, answer.content_type, answer.pieces, ended)

    def _send(
        self, status: int, content_type: str, pieces: Iterable[bytes], ended: Callable[[bytes], None] | None = None
    ) -> None:
        """Sends an answer as its pieces come; `ended` is given all of it before the agent can know that it has ended."""
        content = bytearray()
        try:
            self.send_response(status)
            self.send_header("Content-Type", content_type)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for piece in pieces:
                content += piece
                # An empty chunk would end the answer.
                if piece:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                    self.wfile.flush()
            if ended is not None:
                ended(bytes(content))
            self.wfile.write(b"0\r\n\r\n")
        except ConnectionError:
            # The agent has exited, before or right after the end.
            self.close_connection = True

    def _record(self, rollout: str, started_ns: int, body: bytes, answer: Answer, content: bytes) -> None:
        request = answer_of(body, "application/json")
        document = answer_of(content, answer.content_type)
        call = CallRecord(
            path=self.path.partition("?")[0],
            model=str(request.get("model", "")),
            status=answer.status,
            request=request,
            answer=document,
            usage=usage_of(document),
            error=error_of(document, content) if answer.status >= FIRST_ERROR_STATUS else "",
            started_ns=started_ns,
            ended_ns=now_ns(),
            trace=trace_of(self.headers.get("traceparent", "")),
        )
        self.recording.add_call(rollout, call)


def _key(headers: Mapping[str, str]) -> str:
    lower = {name.lower(): value for name, value in headers.items()}
    return lower.get("x-api-key", "") or lower.get("authorization", "").removeprefix("Bearer ").strip()
