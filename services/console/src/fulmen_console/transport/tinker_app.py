"""The endpoints of the `tinker` package below `/api/v1/`: who calls, the body, one call, the answer as JSON or protobuf."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from fulmen.errors import (
    ArgumentInvalid,
    Code,
    FulmenError,
    InternalError,
    NotFound,
    QuotaExceeded,
    Unimplemented,
    Violation,
)
from fulmen.rpc.channel import FulmenChannel
from fulmen_console.gateway.access import Credentials, headers_of, require_same_origin
from fulmen_console.tinker import requests as given
from fulmen_console.tinker.futures import Future
from fulmen_console.tinker.programs import Caller, Programs
from fulmen_console.tinker.trainer_calls import TrainerCalls
from fulmen_console.tinker.wire import PROTOBUF_TYPE, read_pass
from fulmen_service_kit.http.wire import (
    Receive,
    Scope,
    Send,
    client_address,
    header,
    header_count,
    read_body,
    respond,
)
from fulmen_service_kit.security.auth import SEVERAL
from fulmen_service_kit.security.permissions import require

__all__ = ["TINKER_PATH", "TinkerApp"]

TINKER_PATH: Final = "/api/v1/"
MAX_BODY_BYTES: Final = 8 * 2**20
"""Those of 262,144 tokens with three tensors have 5 MiB."""
MAX_READING_BYTES: Final = 128 * 2**20
"""Of all bodies that are read at a time."""
MAX_CHUNK_BYTES: Final = 2_000_000
"""Size of the data of one call, which the package splits; at most 125,000 tokens, of which `TrainerService` takes 262,144."""
WAIT_S: Final = 20.0
"""Time for which a request waits for an answer; the package asks again."""
_TRAIN: Final = "/fulmen.algorithm.v1.TrainerService/CreateTrainer"
_STATUS: Final = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.UNIMPLEMENTED: 404,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.INTERNAL: 500,
}
"""The others are 400: the package sends requests again after 408, 409, 429 and 5xx."""
_OF_USERS: Final = frozenset(Code) - {Code.INTERNAL, Code.UNAVAILABLE, Code.ABORTED, Code.DEADLINE_EXCEEDED}
Reply = Mapping[str, Any]
Endpoint = Callable[[Caller, bytes], Awaitable[Reply] | Reply]


class TinkerApp:
    """Answers the requests of `TINKER_PATH`."""

    def __init__(self, programs: Programs, channel: FulmenChannel, credentials: Credentials) -> None:
        """`channel` leads to the algorithm service, without a token: each call has its caller's."""
        self._programs = programs
        self._channel = channel
        self._credentials = credentials
        self._reading_bytes = 0
        self._endpoints: dict[tuple[str, str], Endpoint] = {
            ("GET", "healthz"): lambda caller, body: {"status": "ok"},
            ("GET", "get_server_capabilities"): lambda caller, body: self._capabilities(),
            ("POST", "client/config"): lambda caller, body: _CONFIG,
            ("POST", "client/dynamic_config"): lambda caller, body: {"sample_cancel_enabled": True},
            ("POST", "telemetry"): lambda caller, body: {"status": "accepted"},
            ("POST", "create_session"): lambda caller, body: programs.create_session(caller),
            ("POST", "session_heartbeat"): self._of(given.OfSession, programs.heartbeat),
            ("POST", "get_info"): self._of(given.OfModel, programs.get_info),
            ("POST", "create_sampling_session"): self._of(
                given.CreateSamplingSession, programs.create_sampling_session
            ),
            ("POST", "create_model"): self._begun(given.CreateModel, programs.create_model),
            ("POST", "load_weights"): self._begun(given.LoadWeights, programs.load_weights),
            ("POST", "unload_model"): self._begun(given.OfModel, programs.unload_model),
            ("POST", "optim_step"): lambda caller, body: _promise(programs.optim_step(caller, body)),
            ("POST", "save_weights"): lambda caller, body: _promise(programs.save_weights(caller, body)),
            ("POST", "save_weights_for_sampler"): lambda caller, body: _promise(
                programs.save_weights_for_sampler(caller, body)
            ),
            ("POST", "asample"): self._sample,
            ("POST", "cancel_future"): self._cancel,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request (ASGI)."""
        try:
            caller = await self._caller(scope)
            await self._answer(scope, caller, await self._body_of(scope, receive), send)
        except FulmenError as error:
            await respond(send, _STATUS.get(error.code, 400), _body(error), unread=receive)

    async def _body_of(self, scope: Scope, receive: Receive) -> bytes:
        """Reads a body. Raises QuotaExceeded if those that are read now are too large together."""
        taken = 0

        def take(size_bytes: int) -> None:
            nonlocal taken
            if self._reading_bytes + size_bytes > MAX_READING_BYTES:
                raise QuotaExceeded(
                    "The console is handling too many requests.", quota="request_bytes", retry_after_s=1.0
                )
            self._reading_bytes += size_bytes
            taken += size_bytes

        try:
            return await read_body(scope, receive, MAX_BODY_BYTES, take)
        finally:
            self._reading_bytes -= taken

    async def _answer(self, scope: Scope, caller: Caller, body: bytes, send: Send) -> None:
        method, path = scope["method"], scope["path"].removeprefix(TINKER_PATH)
        if (method, path) == ("POST", "retrieve_future"):
            await self._retrieve(caller, body, send)
            return
        reply: Awaitable[Reply] | Reply
        if (method, path) == ("POST", "forward_backward"):
            if header(scope, b"content-type") != PROTOBUF_TYPE or header(scope, b"content-encoding"):
                found = Violation(field="content-type", description="must be application/x-protobuf, uncompressed")
                raise ArgumentInvalid("The request is malformed.", violations=[found])
            reply = _promise(self._programs.forward_backward(caller, read_pass(body), len(body)))
        elif method == "GET" and path.startswith("samplers/"):
            reply = self._programs.get_sampler(caller, path.removeprefix("samplers/"))
        elif method == "POST" and path.startswith("sessions/") and path.endswith("/finish"):
            await self._programs.finish(caller, path.removeprefix("sessions/").removesuffix("/finish"))
            reply = {}
        elif (method, path) in self._endpoints:
            reply = self._endpoints[method, path](caller, body)
        else:
            raise Unimplemented("Fulmen does not support this part of Tinker's API (docs/tinker.md).")
        found_reply = await reply if isinstance(reply, Awaitable) else reply
        await respond(send, 200, json.dumps(found_reply).encode())

    async def _caller(self, scope: Scope) -> Caller:
        """Identifies who calls by the header `X-API-Key`, which has a token of Fulmen, or `tml-` and one.

        Raises:
            FulmenError: if it is nobody who may train: sessions and answers are those of programs that do.
        """
        name = b"x-api-key" if header_count(scope, b"x-api-key") else b"authorization"
        key = header(scope, name).decode("latin-1").strip().removeprefix("Bearer ").removeprefix("tml-")
        # A key that is not a token belongs to dev mode, where calls without a token are allowed.
        authorization = f"Bearer {key}" if key.startswith("eyJ") else ""
        if not header(scope, name):
            # Other pages of a person's browser cannot send the header.
            require_same_origin(headers_of(scope))
        only = authorization if header_count(scope, name) <= 1 else SEVERAL
        identified = await self._credentials.identify(only, client_address(scope))
        require(identified, _TRAIN, identified.own_project)
        return Caller(identified.own_project, TrainerCalls(self._channel, authorization))

    async def _retrieve(self, caller: Caller, given_body: bytes, send: Send) -> None:
        request = given.read(given.RetrieveFuture, given_body)
        try:
            future = self._programs.futures.find(request.request_id, caller.project)
        except NotFound as error:
            await respond(send, 410, _body(error))
            return
        try:
            async with asyncio.timeout(WAIT_S):
                await future.done.wait()
        except TimeoutError:
            waiting = {"type": "try_again", "request_id": future.id, "queue_state": "active"}
            await respond(send, 408, json.dumps(waiting).encode())
            return
        self._programs.futures.fetched(future)
        if future.answer is not None:
            await respond(send, 200, future.answer.body, future.answer.content_type)
            return
        failure = future.error or InternalError("The call has no answer.")
        category = "user" if failure.code in _OF_USERS else "server"
        body = {"error": str(failure), "category": category, **_details(failure)}
        await respond(send, 200, json.dumps(body).encode())

    def _sample(self, caller: Caller, body: bytes) -> Reply:
        future, sequence_ids = self._programs.sample(caller, given.read(given.Sample, body), len(body))
        return {**_promise(future), "sample_sequence_ids": sequence_ids}

    def _cancel(self, caller: Caller, body: bytes) -> Reply:
        request = given.read(given.CancelFuture, body)
        # Others cannot be undone.
        if ":sample:" in request.request_id:
            self._programs.futures.cancel(request.request_id, caller.project)
        return {}

    def _capabilities(self) -> Reply:
        models = sorted(self._programs.names.given)
        return {
            "supported_models": [{"model_name": name, "trainable": True, "sampleable": True} for name in models],
        }

    @staticmethod
    def _of(kind: type[Any], call: Callable[[Caller, Any], Awaitable[Reply] | Reply]) -> Endpoint:
        return lambda caller, body: call(caller, given.read(kind, body))

    @staticmethod
    def _begun(kind: type[Any], call: Callable[[Caller, Any, int], Future]) -> Endpoint:
        return lambda caller, body: _promise(call(caller, given.read(kind, body), len(body)))


_CONFIG: Final = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,
    "proto_compress_fwdbwd": False,
    "fwdbwd_max_chunk_len": 1024,
    "fwdbwd_max_chunk_bytes_count": MAX_CHUNK_BYTES,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}


def _promise(future: Future) -> Reply:
    return {"request_id": future.id}


def _body(error: FulmenError) -> bytes:
    return json.dumps({"detail": str(error), **_details(error)}).encode()


def _details(error: FulmenError) -> Reply:
    return {
        "code": error.code.value.lower(),
        "reason": error.reason,
        "violations": [{"field": each.field, "description": each.description} for each in error.violations],
    }
