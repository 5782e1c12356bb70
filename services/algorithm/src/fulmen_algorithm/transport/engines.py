"""`fulmen.algorithm.v1.EngineService`."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Final
from urllib.parse import urlsplit

import grpc.aio

from fulmen.algorithm.v1 import engine_service_pb2 as pb
from fulmen.algorithm.v1.engine_service_pb2_grpc import EngineServiceServicer, EngineServiceStub
from fulmen.errors import ArgumentInvalid, Violation
from fulmen_algorithm.engines.joined import SILENCE_LIMIT_S, JoinedEngine, JoiningEngine
from fulmen_algorithm.engines.joining import RunEngines
from fulmen_algorithm.engines.peers import PeerAddress
from fulmen_algorithm.transport.forwarding import Forwarding
from fulmen_algorithm.transport.join_streams import JoinStreams, again, opening
from fulmen_algorithm.transport.run_access import require_own_run

MAX_URL: Final = 2048
_ENGINE_ID: Final = re.compile(r"[a-z0-9-]{1,32}")
_PEER_KEY: Final = re.compile(r"[A-Za-z0-9_-]{32,64}")
_SHA256: Final = re.compile(r"|[0-9a-f]{64}")


class EngineServicer(EngineServiceServicer):
    """Decodes, calls once, encodes."""

    def __init__(self, engines: RunEngines, forwarding: Forwarding) -> None:
        self._engines = engines
        self._forwarding = forwarding
        self._streams = JoinStreams()

    def drain(self) -> None:
        """Ends the open streams; the agents join again when the service is back."""
        self._streams.drain()

    async def JoinEngine(
        self, requests: AsyncIterator[pb.JoinEngineRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.JoinEngineResponse]:
        """Takes an engine into the service of a run."""
        hello = await _hello(requests)
        run = hello.training_run
        self._streams.require_open()
        if owner := self._engines.owner_of(run):
            said = again(pb.JoinEngineRequest(hello=hello), requests)
            async for forwarded in self._forwarding.stream(owner, EngineServiceStub, "JoinEngine", said, context):
                yield forwarded
            return
        engine = _joined(hello)
        orders = self._streams.kept(
            engine,
            serving=self._engines.serve_with(run, engine),
            reading=_read(requests, engine),
            silence_limit_s=SILENCE_LIMIT_S,
        )
        async with aclosing(orders):
            async for order in orders:
                yield order


async def _hello(requests: AsyncIterator[pb.JoinEngineRequest]) -> pb.EngineHello:
    hello = (await opening(requests, pb.JoinEngineRequest())).hello
    if problems := _problems(hello):
        raise ArgumentInvalid("The engine cannot join.", violations=problems)
    require_own_run(hello.training_run)
    return hello


def _joined(hello: pb.EngineHello) -> JoinedEngine:
    about = JoiningEngine(
        engine_id=hello.engine_id,
        base_url=hello.base_url,
        requires_token=hello.requires_token,
        policy_version=hello.policy_version,
        sha256=hello.sha256,
        peer=PeerAddress(name=hello.engine_id, target=hello.peer_target, key=hello.peer_key),
    )
    return JoinedEngine(about)


def _problems(hello: pb.EngineHello) -> list[Violation]:
    found = []
    if not _ENGINE_ID.fullmatch(hello.engine_id):
        found.append(Violation(field="hello.engine_id", description="has 1 to 32 characters of [a-z0-9-]"))
    if not _is_url(hello.base_url):
        text = "must be an address such as http://10.0.0.7:8000/v1"
        found.append(Violation(field="hello.base_url", description=text))
    if hello.policy_version < 0 or not _SHA256.fullmatch(hello.sha256):
        found.append(Violation(field="hello.sha256", description="must be the checksum of a version, or empty"))
    if hello.peer_target and not _is_target(hello.peer_target):
        found.append(Violation(field="hello.peer_target", description="must be host:port, or empty"))
    if hello.peer_target and not _PEER_KEY.fullmatch(hello.peer_key):
        found.append(Violation(field="hello.peer_key", description="has 32 to 64 characters of [A-Za-z0-9_-]"))
    return found


def _is_target(text: str) -> bool:
    return "/" not in text and _is_url(f"http://{text}")


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
    return len(text) <= MAX_URL and parts.scheme in ("http", "https") and bool(parts.hostname and port) and is_plain


async def _read(requests: AsyncIterator[pb.JoinEngineRequest], engine: JoinedEngine) -> None:
    """Takes messages until the agent ends the stream."""
    async for message in requests:
        if message.HasField("hello"):
            text = "must be the first message, and only the first"
            raise ArgumentInvalid("The stream is malformed.", violations=[Violation(field="hello", description=text)])
        try:
            engine.hear(message)
        except asyncio.QueueFull:
            text = "answers more calls than were sent"
            raise ArgumentInvalid(
                "The stream is malformed.", violations=[Violation(field="message", description=text)]
            ) from None
