"""Requests of paths that the proxy does not serve itself, passed on to the backends that the operator has named for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import parse_qsl, quote

from fulmen.errors import BackendNotFound, BackendUnavailable
from fulmen.ids import ALL_PROJECTS
from fulmen_llm_proxy.apis.api import ApiName, Dialect
from fulmen_llm_proxy.apis.errors import error_event
from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.backends.headers import MAX_VALUE_BYTES, to_backend
from fulmen_llm_proxy.backends.passed_on import PassedOnClient, PassedRequest
from fulmen_llm_proxy.calls.answer_writer import AnswerWriter
from fulmen_llm_proxy.calls.failures import SOURCE_HEADER, Refused, call_error
from fulmen_llm_proxy.calls.gate import Gate
from fulmen_llm_proxy.routing.backend_state import BackendStates
from fulmen_llm_proxy.routing.table import Backend
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_llm_proxy.settings import PassedPath
from fulmen_service_kit.http.wire import Scope, header

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_VERSION = "/v1"
_SAFE = "-._~!$&'()*+,;=:@"
_NOT_A_SEGMENT = frozenset({"", ".", ".."})


class PassedOn:
    """Answers requests of paths that are passed on."""

    def __init__(
        self,
        paths: Mapping[str, PassedPath],
        *,
        client: PassedOnClient,
        tables: TableHolder,
        states: BackendStates,
        gate: Gate,
    ) -> None:
        """Sets the paths by prefix, such as `/v1/files`; a longer one wins."""
        self._paths = dict(sorted(paths.items(), key=lambda item: -len(item[0])))
        self._client = client
        self._tables = tables
        self._states = states
        self._gate = gate

    def methods(self, path: str) -> tuple[str, ...] | None:
        """Returns the methods of a path; None if it is not passed on."""
        return METHODS if self._prefix(path) else None

    def _prefix(self, path: str) -> str:
        return next((each for each in self._paths if path == each or path.startswith(f"{each}/")), "")

    def allow(self, path: str, caller: Caller) -> None:
        """Checks that a path is passed on for a caller, before its body is read.

        Raises:
            Refused: if it is not, as if there were no such path.
        """
        projects = self._paths[self._prefix(path)].projects
        segments = path.split("/")[1:]
        if (projects and caller.models_of not in (ALL_PROJECTS, *projects)) or _NOT_A_SEGMENT & set(segments):
            raise Refused(404, "path_not_found", f"Path {path[:200]} not found.")

    async def answer(self, scope: Scope, path: str, caller: Caller, body: bytes, writer: AnswerWriter) -> None:
        """Answers one request.

        Raises:
            AttemptOver: if the caller's attempt has ended.
            ModelLimitExceeded: if a limit of its project, its attempt or the backend is exhausted.
            PriceUnknown: if a budget in dollars applies to the caller: what the request costs is unknown.
            Refused: if the process has reached its maximum of calls in flight.
            BackendNotFound: if the backend of the path is not registered.
            BackendUnavailable: if it cannot be reached.
        """
        prefix = self._prefix(path)
        backend = self._backend(prefix)
        with self._gate.pass_on(caller, backend, what=prefix), self._slot(backend):
            request = PassedRequest(
                method=scope["method"],
                path=quote(path.removeprefix(_VERSION), safe=f"/{_SAFE}"),
                query=parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True),
                headers=_headers(scope, body),
                body=body,
            )
            async with writer.watch() as watch, self._client.ask(backend, request) as answer:
                extra = [*answer.headers, *([(SOURCE_HEADER, b"backend")] if answer.status >= 400 else [])]
                if not answer.is_stream:
                    await writer.whole(answer.status, answer.body, answer.content_type, extra)
                    return
                await writer.begin(answer.content_type, extra)
                await writer.piece(answer.body)
                try:
                    async for piece in answer.pieces:
                        await writer.piece(piece)
                except BackendUnavailable as error:
                    await writer.piece(error_event(call_error(error), ApiName.CHAT, Dialect.OPENAI))
                watch.settle()
                await writer.end()

    @contextmanager
    def _slot(self, backend: Backend) -> Iterator[None]:
        state = self._states.of(backend.id)
        if not state.try_acquire(backend.max_in_flight):
            raise Refused(429, "backend_busy", f"Backend '{backend.id}' has no free slot.")
        try:
            yield
        finally:
            state.release()

    def _backend(self, prefix: str) -> Backend:
        self._tables.require_loaded()
        backend_id = self._paths[prefix].backend
        backend = self._tables.current.backends.get(backend_id)
        if backend is None:
            name = f"backends/{backend_id}"
            raise BackendNotFound(f"Backend {name}, to which {prefix} is forwarded, not found.", backend=name)
        return backend


def _headers(scope: Scope, body: bytes) -> dict[str, str]:
    """Returns the caller's headers that a backend may see."""
    passed = to_backend(scope["headers"])
    for name in ("content-type", "accept"):
        value = header(scope, name.encode())
        if len(value) <= MAX_VALUE_BYTES and value.isascii() and value.decode("ascii").isprintable() and value:
            passed[name] = value.decode("ascii")
    if not body:
        passed.pop("content-type", None)
    return passed
