"""Weight agents fetch versions from each other, and from the service what a peer does not send, or sends wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from fulmen.algorithm.v1 import engine_service_pb2 as pb
from fulmen.algorithm.v1 import weight_service_pb2 as weights_pb
from fulmen.algorithm.v1.weight_service_pb2_grpc import (
    WeightServiceServicer,
    WeightServiceStub,
    add_WeightServiceServicer_to_server,
)
from fulmen.errors import FulmenError, ModelNotFound, PermissionDenied, TokenInvalid
from fulmen.models.peer import PeerFailure
from fulmen.models.transfer import TransferFailed
from fulmen.rpc.channel import open_channel
from fulmen_algorithm.weight_agent.servicer import PeerKey, PeerServicer
from fulmen_algorithm.weight_agent.settings import WeightAgentSettings
from fulmen_service_kit.rpc.server import build_server
from tests.support.algorithm.fetched_versions import PROJECT, World, weights_of, world
from tests.support.algorithm.model_folders import content_of
from tests.support.algorithm.policy_versions import tensors
from tests.support.store.running import engine_token

__all__ = ["world"]

RUN = f"{PROJECT}/trainingRuns/run"
PATIENT_S, SOON_S, LIMIT_S = 60, 1, 30
Answer = Callable[[bytes], AsyncIterator[bytes]]


class Family:
    """Agents that fetch from each other."""

    def __init__(self, world: World, folder: Path, stack: AsyncExitStack) -> None:
        self._world, self._folder, self._stack = world, folder, stack
        self._count = 0

    async def agent(self) -> World:
        """Makes an agent that has nothing yet."""
        self._count += 1
        return World(self._world.policies, self._folder / f"agent-{self._count}")

    async def serving(self, agent: World, *, token: str | None = None) -> pb.Peer:
        """Has an agent serve others; `token` is what they present instead of its key."""
        key = PeerKey(RUN)
        settings = WeightAgentSettings(token="unused", port=0, state_dir=self._folder)
        server = build_server(
            settings,
            verifier=key,
            service_names=(),
            register=lambda server: add_WeightServiceServicer_to_server(PeerServicer(agent.held), server),
        )
        await server.server.start()
        self._stack.push_async_callback(server.server.stop, None)
        peer = pb.Peer(target=f"127.0.0.1:{server.port}", key=key.text if token is None else token)
        peer.patience.seconds = PATIENT_S
        return peer


@pytest.fixture
async def family(world: World, tmp_path: Path) -> AsyncIterator[Family]:
    async with AsyncExitStack() as stack:
        yield Family(world, tmp_path, stack)


async def published(world: World) -> Path:
    """Publishes complete weights, and two differences; returns the folder of the first version."""
    folder = await world.full(1)
    for number in (2, 3):
        await world.delta(number)
    return folder


async def test_the_service_sends_a_version_to_one_agent_of_a_chain(world: World, family: Family) -> None:
    folder = await published(world)
    agents = [await family.agent() for _ in range(3)]
    peers = [None, *[await family.serving(agent) for agent in agents[:-1]]]
    for kind, number in ((pb.WEIGHTS_KIND_FULL, 1), (pb.WEIGHTS_KIND_DELTA, 2), (pb.WEIGHTS_KIND_DELTA, 3)):
        for agent, peer in zip(agents, peers, strict=True):
            policy = await agent.fetch(kind, number, loaded=number - 1, peer=peer)
            assert agent.fetched.peer_bytes == (agent.fetched.size_bytes if peer else 0)
            assert agent.fetched.peer_failure is PeerFailure.NONE
            assert number > 1 or content_of(policy.path) == content_of(folder)
            assert await weights_of(policy) == tensors(number).sha256()


async def test_adapters_and_their_base_come_from_another_agent(world: World, family: Family) -> None:
    base = await world.full(1)
    parent, child, late = [await family.agent() for _ in range(3)]
    peer = await family.serving(parent)
    for number in (2, 3):
        adapter = await world.lora(number, base)
        await parent.fetch(pb.WEIGHTS_KIND_LORA, number)
        # One that joins later needs the base as well, which the parent has since an earlier version.
        for agent in (child, late) if number == 3 else (child,):
            policy = await agent.fetch(pb.WEIGHTS_KIND_LORA, number, peer=peer)
            assert content_of(policy.path) == content_of(adapter)
            assert agent.fetched.peer_bytes == agent.fetched.size_bytes > 0


async def test_an_agent_sends_what_it_is_still_fetching(world: World, family: Family, tmp_path: Path) -> None:
    folder = await world.full(1)
    content = (folder / "model.safetensors").read_bytes()
    half, rest = asyncio.Event(), asyncio.Event()

    async def slowly(data: bytes) -> AsyncIterator[bytes]:
        yield data[: len(data) // 2]
        if data == content:
            half.set()
            await rest.wait()
        yield data[len(data) // 2 :]

    parent, child = await family.agent(), await family.agent()
    async with lying(folder, slowly) as source:
        fetching = asyncio.create_task(parent.fetch(pb.WEIGHTS_KIND_FULL, 1, peer=source))
        peer = await family.serving(parent)
        following = asyncio.create_task(child.fetch(pb.WEIGHTS_KIND_FULL, 1, peer=peer))
        async with asyncio.timeout(LIMIT_S):
            await half.wait()
            arriving = tmp_path / "agent-2/1-full.part/model.safetensors.part"
            while not (arriving.exists() and arriving.stat().st_size == len(content) // 2):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not fetching.done()
        rest.set()
        policies = await asyncio.gather(fetching, following)
    assert [content_of(policy.path) for policy in policies] == [content_of(folder)] * 2
    assert child.fetched.peer_bytes == child.fetched.size_bytes


async def altered(data: bytes) -> AsyncIterator[bytes]:
    yield bytes([data[0] ^ 1]) + data[1:]


async def cut_off(data: bytes) -> AsyncIterator[bytes]:
    yield data[: len(data) // 2]


async def too_long(data: bytes) -> AsyncIterator[bytes]:
    yield data + b"x"


async def empty(data: bytes) -> AsyncIterator[bytes]:
    for _ in range(2):
        yield b""


async def never(data: bytes) -> AsyncIterator[bytes]:
    yield data[: len(data) // 2]
    await asyncio.sleep(PATIENT_S)


@asynccontextmanager
async def lying(folder: Path, answer: Answer, *, manifests: WeightServiceStub | None = None) -> AsyncIterator[pb.Peer]:
    """Serves the files of a folder, but not as they are, and the true manifests of a service."""

    class Liar(WeightServiceServicer):
        async def GetWeights(self, request: weights_pb.GetWeightsRequest, context: Any) -> Any:
            assert manifests is not None
            return await manifests.GetWeights(request)

        async def DownloadChunks(self, request: weights_pb.DownloadChunksRequest, context: Any) -> AsyncIterator[Any]:
            data = (folder / request.path).read_bytes()[request.offset :]
            async for chunk in answer(data):
                yield weights_pb.DownloadChunksResponse(data=chunk)

    server = grpc.aio.server()
    add_WeightServiceServicer_to_server(Liar(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    peer = pb.Peer(target=f"127.0.0.1:{port}", key="k" * 32)
    peer.patience.seconds = SOON_S
    try:
        yield peer
    finally:
        await server.stop(None)


@pytest.mark.parametrize("answer", [altered, too_long, cut_off], ids=lambda value: value.__name__)
async def test_what_the_service_itself_sends_wrong_all_the_time_is_never_there(
    world: World, tmp_path: Path, answer: Answer
) -> None:
    folder = await world.full(1)
    async with lying(folder, answer, manifests=world.policies.client) as service, open_channel(service.target) as line:
        world.policies.client = WeightServiceStub(line)
        with pytest.raises(TransferFailed):
            await World(world.policies, tmp_path / "victim").fetch(pb.WEIGHTS_KIND_FULL, 1)
    assert not (tmp_path / "victim/1-full").exists()


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (altered, PeerFailure.WRONG),
        (too_long, PeerFailure.WRONG),
        (cut_off, PeerFailure.SLOW),
        (empty, PeerFailure.SLOW),
        (never, PeerFailure.SLOW),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_what_a_peer_sends_wrong_or_not_at_all_comes_from_the_service(
    world: World, family: Family, answer: Answer, failure: PeerFailure
) -> None:
    folder = await world.full(1)
    child = await family.agent()
    async with lying(folder, answer) as peer:
        policy = await child.fetch(pb.WEIGHTS_KIND_FULL, 1, peer=peer)
    assert content_of(policy.path) == content_of(folder)
    assert child.fetched.peer_failure is failure


async def test_a_peer_that_is_gone_or_refuses_costs_its_patience_and_one_without_the_version_nothing(
    world: World, family: Family
) -> None:
    folder = await world.full(1)
    idle = await family.agent()
    refusing = await family.serving(idle, token="another key")
    gone = pb.Peer(target="127.0.0.1:1", key="k" * 32)
    gone.patience.seconds = SOON_S
    for peer, failure in (
        (refusing, PeerFailure.SLOW),
        (gone, PeerFailure.SLOW),
        (await family.serving(idle), PeerFailure.NONE),
    ):
        child = await family.agent()
        policy = await child.fetch(pb.WEIGHTS_KIND_FULL, 1, peer=peer)
        assert content_of(policy.path) == content_of(folder)
        assert (child.fetched.peer_failure, child.fetched.peer_bytes) == (failure, 0)


async def test_a_stranger_gets_nothing_of_an_agent_and_nobody_more_than_its_versions(
    world: World, family: Family
) -> None:
    await world.full(1)
    agent = await family.agent()
    await agent.fetch(pb.WEIGHTS_KIND_FULL, 1)
    peer = await family.serving(agent)

    async def answers(token: str, path: str = "config.json") -> type[Any]:
        source = world.policies.source("/versions/1", weights_pb.WEIGHT_FORM_FULL)
        request = weights_pb.DownloadChunksRequest(source=source, path=path, size_bytes=10)
        async with open_channel(peer.target, token=token) as channel:
            try:
                return type(await anext(aiter(WeightServiceStub(channel).DownloadChunks(request))))
            except FulmenError as error:
                return type(error)

    assert await answers(peer.key) is weights_pb.DownloadChunksResponse
    for token in ("", peer.key[:-1], f"{peer.key}x", engine_token(RUN)):
        assert await answers(token) is TokenInvalid
    for path in ("../1-full/config.json", "/etc/passwd", "model.py"):
        assert issubclass(await answers(peer.key, path), FulmenError)
    async with open_channel(peer.target, token=peer.key) as channel:
        with pytest.raises(PermissionDenied):
            await WeightServiceStub(channel).ListModels(weights_pb.ListModelsRequest())
        source = weights_pb.WeightSource(model=f"{PROJECT}/models/tiny")
        with pytest.raises(FulmenError):
            await WeightServiceStub(channel).GetWeights(weights_pb.GetWeightsRequest(source=source))
        missing = world.policies.source("/versions/1", weights_pb.WEIGHT_FORM_DELTA)
        request = weights_pb.DownloadChunksRequest(source=missing, path="config.json", size_bytes=10)
        with pytest.raises(ModelNotFound):
            await anext(aiter(WeightServiceStub(channel).DownloadChunks(request)))
