"""Several engines of one policy: how they start, take versions, fail, leave and join."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from google.protobuf.empty_pb2 import Empty

from fulmen.algorithm.v1 import engine_service_pb2 as pb
from fulmen_algorithm.engines import laggards
from fulmen_algorithm.engines.engine import EngineFailed
from fulmen_algorithm.engines.joined import JoinedEngine, JoiningEngine
from fulmen_algorithm.engines.pool import EnginePool
from fulmen_algorithm.engines.proxy_admin import PolicyRoutes, ProxyAdmin
from fulmen_algorithm.engines.replicas import JOINED_FROM, EngineSet
from fulmen_algorithm.engines.supervisor import EngineSupervisor
from fulmen_algorithm.policy.engine_settings import EmbeddedEngine, ExternalEngine
from fulmen_algorithm.policy.served import ServedPolicy
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import EngineCount, PublishedPolicy, SwapStats
from fulmen_algorithm.training.settings import WeightsKind
from tests.support.algorithm.light_engines import EMBEDDED, WAIT_S, LightEngine, World, light_world

THREE = EmbeddedEngine(replicas=3)
RUN = "projects/default/trainingRuns/a"
BACKENDS = ["backends/engine-a", "backends/engine.1-a", "backends/engine.2-a"]


def engines(world: World) -> list[LightEngine]:
    return [engine for _, _, engine in world.started]


def same(version: int, backends: list[str] = BACKENDS) -> dict[str, int]:
    return dict.fromkeys(backends, version)


async def until_ready(pool: EnginePool, count: int) -> None:
    async with asyncio.timeout(WAIT_S):
        while pool.engines_of(RUN).ready != count:  # noqa: ASYNC110  # the pool tells nobody
            await asyncio.sleep(0.01)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with light_world(tmp_path) as made:
        yield made


async def test_each_engine_has_a_backend_and_a_port_and_is_a_target_of_the_route(world):
    async with world.pool(max_engines=3) as pool:
        serving = await world.serve(pool, "a", engine=THREE)
        assert sorted(world.proxy.backends) == BACKENDS
        ports = {f"http://127.0.0.1:{9000 + number}/v1" for number in range(3)}
        assert set(world.proxy.backends.values()) == ports
        assert world.proxy.targets["routes/a"] == same(1)
        assert pool.engines_of(RUN) == EngineCount(3, 3)
        assert await serving.sampled_tokens() == 21


async def test_all_take_a_version_and_the_cost_is_the_longest_pause_and_all_bytes(world):
    async with world.pool(max_engines=3) as pool:
        serving = await world.serve(pool, "a", engine=THREE)
        for number, engine in enumerate(engines(world)):
            engine.stats = SwapStats(pause_s=float(number), size_bytes=10)
        assert await serving.swap(world.published("a", 2)) == SwapStats(pause_s=2.0, size_bytes=30)
        assert [engine.swaps for engine in engines(world)] == [[2]] * 3
        assert world.proxy.targets["routes/a"] == same(2)


async def test_one_that_takes_no_weights_is_held_and_restarted_while_the_run_goes_on(world):
    async with world.pool(max_engines=3) as pool:
        serving = await world.serve(pool, "a", engine=THREE)
        refusing = engines(world)[1]
        refusing.failures.append(EngineFailed("It refuses."))
        world.may_start.clear()
        await serving.swap(world.published("a", 2))
        name = next(name for name, url in world.proxy.backends.items() if f":{refusing.port}/" in url)
        assert world.proxy.held == {name}
        assert world.proxy.targets["routes/a"] == same(2) | {name: 1}
        assert pool.engines_of(RUN) == EngineCount(2, 3)
        # Another version comes before it is back: it starts with that one, or gets it before it serves.
        await serving.swap(world.published("a", 3))
        world.may_start.set()
        await until_ready(pool, 3)
        assert world.proxy.targets["routes/a"] == same(3)
        assert world.proxy.held == set()
        again = engines(world)[3]
        assert ([world.started[3][1], *again.swaps])[-1] == 3


async def test_if_none_takes_the_weights_the_run_waits_until_they_are_restarted(world):
    async with world.pool(max_engines=3) as pool:
        serving = await world.serve(pool, "a", engine=THREE)
        for engine in engines(world):
            engine.failures.append(EngineFailed("It refuses."))
        assert await serving.swap(world.published("a", 2)) == SwapStats()
        assert [version for _, version, _ in world.started] == [1] * 3 + [2] * 3
        assert world.proxy.targets["routes/a"] == same(2)


async def test_one_that_does_not_start_is_reported_and_started_again_while_the_others_serve(world):
    async with world.pool(max_engines=3) as pool:
        world.failures = [EngineFailed("no memory")] * 3 + [EngineFailed("first")] * 2
        await world.serve(pool, "a", engine=THREE)
        await until_ready(pool, 3)
        assert world.proxy.targets["routes/a"] == same(1)
        assert len(world.started) == 3


async def test_a_run_whose_engines_all_do_not_start_fails(world):
    async with world.pool(max_engines=3) as pool:
        world.failures = [EngineFailed("no memory")] * 9
        with pytest.raises(RunFailed, match="no memory"):
            await world.serve(pool, "a", engine=THREE)


async def test_one_that_dies_is_restarted_alone(world):
    async with world.pool(max_engines=3) as pool:
        await world.serve(pool, "a", 4, engine=THREE)
        engines(world)[2].end.set()
        await world.until_started(4)
        await until_ready(pool, 3)
        assert [engine.end.is_set() for engine in engines(world)] == [False, False, True, False]
        assert world.started[3][1] == 4
        assert [text for text in world.notices if "backends/engine" in text and "It ended" in text]


async def test_too_many_engines_are_refused_with_both_numbers_and_idle_ones_make_room(world):
    async with world.pool(max_engines=4) as pool:
        with pytest.raises(RunFailed, match="needs 5 of the service's 4 engines"):
            await world.serve(pool, "z", engine=EmbeddedEngine(replicas=5))
        (await world.serve(pool, "b")).release()
        (await world.serve(pool, "c")).release()
        kept = await world.serve(pool, "a", engine=THREE)
        assert set(world.proxy.routes) == {"routes/a", "routes/c"}
        with pytest.raises(RunFailed, match=r"needs 2 of the service's 4 engines .* 3 serve"):
            await world.serve(pool, "d", engine=EmbeddedEngine(replicas=2))
        kept.release()
        await world.serve(pool, "d", engine=EmbeddedEngine(replicas=2))
        # The least recently used policies give way until there is room: one engine was not enough.
        assert set(world.proxy.routes) == {"routes/d"}
        assert sorted(world.proxy.backends) == ["backends/engine-d", "backends/engine.1-d"]
        ports = [engine.port for engine in engines(world) if not engine.end.is_set()]
        assert len(ports) == len(set(ports)) == 2


async def test_a_run_with_fewer_engines_keeps_those_and_one_with_more_adds_some(world):
    async with world.pool(max_engines=4) as pool:
        (await world.serve(pool, "a", engine=THREE)).release()
        fewer = await world.serve(pool, "a", 2, EmbeddedEngine(replicas=2))
        assert world.proxy.targets["routes/a"] == same(2, BACKENDS[:2])
        assert sorted(world.proxy.backends) == BACKENDS[:2]
        assert sorted(engine.end.is_set() for engine in engines(world)) == [False, False, True]
        assert await fewer.sampled_tokens() == 21
        fewer.release()
        await world.serve(pool, "a", 3, THREE)
        assert world.proxy.targets["routes/a"] == same(3)
        assert len(world.started) == 4


async def test_all_engines_come_back_with_the_service(world):
    async with world.pool(max_engines=3) as pool:
        (await world.serve(pool, "a", 2, THREE)).release()
    async with world.pool(max_engines=3) as pool:
        await world.until_started(6)
        await world.serve(pool, "a", 2, THREE)
        assert len(world.started) == 6
        assert world.proxy.targets["routes/a"] == same(2)


async def test_all_engines_are_left_to_another_service(world):
    async with world.pool(max_engines=3) as pool:
        await world.serve(pool, "a", 1, THREE)
        pool.hand_over("a")
        world.proxy.backends = dict.fromkeys(BACKENDS, "http://another:9000/v1")
        for engine in engines(world):
            engine.end.set()
        await world.serve(pool, "b", 1, THREE)
        assert {name: world.proxy.backends[name] for name in BACKENDS} == dict.fromkeys(
            BACKENDS, "http://another:9000/v1"
        )
        assert world.proxy.targets["routes/a"] == same(1)


async def test_several_external_engines_are_attached_to_and_promoted_each(world):
    urls = [f"http://127.0.0.1:{port}/v1" for port in (1, 2)]
    async with world.pool(max_engines=2) as pool:
        serving = await world.serve(pool, "a", 1, ExternalEngine(kind="external", base_urls=urls))
        await serving.swap(world.published("a", 2))
        assert world.proxy.targets["routes/a"] == same(2, BACKENDS[:2])
        assert sorted(engine.base_url for engine in world.settings) == urls


async def test_one_joins_and_leaves_while_the_others_serve(world):
    async with world.channel() as channel:
        routes = PolicyRoutes(channel, project="projects/default")

        def member(name: str) -> EngineSupervisor:
            proxy = ProxyAdmin(channel, backend_id=name, routes=routes)
            made = EngineSupervisor(world.options, proxy, outage_limit_s=5, starter=world)
            running.append(asyncio.create_task(made.run()))
            return made

        running: list[asyncio.Task[None]] = []
        served = ServedPolicy(project="projects/default", policy=world.published("a", 1), overrides={}, engine=EMBEDDED)
        group = EngineSet(routes)
        group.members[0] = member("engine-a")
        await group.serve(served, world.notice)
        world.may_start.clear()
        joining = asyncio.create_task(
            group.add(JOINED_FROM, member("far"), replace(served, policy=world.published("a", 7)), world.notice)
        )
        await asyncio.sleep(0)
        # The run does not wait for it, and it has the version that was published meanwhile before it serves.
        await group.swap(world.published("a", 2))
        assert world.proxy.targets["routes/a"] == {"backends/engine-a": 2}
        world.may_start.set()
        await joining
        assert world.proxy.targets["routes/a"] == {"backends/engine-a": 2, "backends/far": 2}
        await group.swap(world.published("a", 3))
        assert world.proxy.targets["routes/a"] == {"backends/engine-a": 3, "backends/far": 3}
        tokens = await group.sampled_tokens()
        await group.remove(JOINED_FROM)
        assert world.proxy.targets["routes/a"] == {"backends/engine-a": 3}
        assert "backends/far" not in world.proxy.backends
        assert await group.sampled_tokens() == tokens
        await group.retire()
        assert world.proxy.routes == {}
        await asyncio.gather(*running)


class SlowEngine:
    """An engine of another machine, which answers when it may."""

    def __init__(self, pool: EnginePool) -> None:
        self.engine = JoinedEngine(JoiningEngine(engine_id="gpu-7", base_url="http://10.0.0.7:8000/v1"))
        self.orders: list[str] = []
        self.may_answer = asyncio.Event()
        self.serving = asyncio.create_task(pool.join(RUN, self.engine))
        self._answering = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        while (message := await self.engine.next_order()) is not None:
            if message.HasField("gate_done"):
                done = pb.WeightsLoaded(order=message.gate_done.order, sha256=self.orders[-1])
                self.engine.hear(pb.JoinEngineRequest(loaded=done))
                continue
            self.orders.append(message.load.sha256)
            await self.may_answer.wait()
            promote = pb.GateCall(order=message.load.order, promote=Empty())
            self.engine.hear(pb.JoinEngineRequest(gate=promote))

    async def leaves(self) -> None:
        self.engine.leave()
        self.may_answer.set()
        await asyncio.wait([self.serving, self._answering])


JOINED = f"backends/engine.{JOINED_FROM}-a"


@pytest.mark.parametrize(
    ("kind", "fetched"),
    [(WeightsKind.FULL, [1, 2, 5, 6]), (WeightsKind.DELTA, [1, 2, 3, 4, 5, 6])],
    ids=["all weights", "differences"],
)
async def test_a_slow_engine_of_another_machine_is_left_behind_and_catches_up(world, monkeypatch, kind, fetched):
    monkeypatch.setattr(laggards, "LEAST_WAIT_S", 0.2)

    def published(version: int) -> PublishedPolicy:
        base = f"{version - 1:064}" if kind is WeightsKind.DELTA else ""
        return replace(world.published("a", version), kind=kind, sha256=f"{version:064}", base_sha256=base)

    async with world.pool() as pool:
        serving = await world.serve(pool, "a")
        slow = SlowEngine(pool)
        slow.may_answer.set()
        await until_ready(pool, 2)
        slow.may_answer.clear()
        for version in (2, 3, 4, 5):
            await serving.swap(published(version))
        assert world.proxy.targets["routes/a"] == {BACKENDS[0]: 5, JOINED: 1}
        assert len([text for text in world.notices if "is slow" in text]) == 1
        slow.may_answer.set()
        async with asyncio.timeout(WAIT_S):
            while any(task.get_name() == "laggard" for task in asyncio.all_tasks()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert world.proxy.targets["routes/a"] == {BACKENDS[0]: 5, JOINED: 5}
        # It is waited for again, and was never restarted.
        monkeypatch.setattr(laggards, "LEAST_WAIT_S", WAIT_S)
        await serving.swap(published(6))
        assert world.proxy.targets["routes/a"] == {BACKENDS[0]: 6, JOINED: 6}
        assert [int(sha256 or "1") for sha256 in slow.orders] == fetched
        await slow.leaves()


async def test_a_slow_engine_that_leaves_costs_nothing(world, monkeypatch):
    monkeypatch.setattr(laggards, "LEAST_WAIT_S", 0.2)
    async with world.pool() as pool:
        serving = await world.serve(pool, "a")
        slow = SlowEngine(pool)
        slow.may_answer.set()
        await until_ready(pool, 2)
        slow.may_answer.clear()
        await serving.swap(world.published("a", 2))
        await slow.leaves()
        await serving.swap(world.published("a", 3))
        assert world.proxy.targets["routes/a"] == {BACKENDS[0]: 3}
