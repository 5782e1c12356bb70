"""An engine that has joined: orders go out, answers come in, and whoever leaves is missed at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty

from fulmen.algorithm.v1 import engine_service_pb2 as pb
from fulmen_algorithm.engines.engine import ENGINE_KEY_NAME, EngineFailed, EngineKind
from fulmen_algorithm.engines.joined import MAX_REPORTS, SILENCE_LIMIT_S, JoinedEngine, JoiningEngine
from fulmen_algorithm.engines.peers import Needed, PeerAddress, PeerTree
from fulmen_algorithm.policy.engine_settings import EmbeddedEngine, VllmEngine
from fulmen_algorithm.runs.ports import PublishedPolicy, SwapStats
from fulmen_algorithm.training.settings import WeightsKind

SHA = "a" * 64
POLICY = PublishedPolicy(name="resources/policy.p/versions/3", version=3, path=Path("unused"), sha256=SHA)
ABOUT = JoiningEngine(engine_id="gpu-7", base_url="http://10.0.0.7:8000/v1")


class Gate:
    """Notes its calls."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    async def hold(self, ttl_s: float) -> None:
        self.calls.append(("hold", ttl_s))

    async def idle(self, limit_s: float) -> bool:
        self.calls.append(("idle", limit_s))
        return False

    async def promote(self) -> None:
        self.calls.append("promote")

    async def release(self) -> None:
        self.calls.append("release")


def loaded(order: int, *, sha256: str = SHA) -> pb.JoinEngineRequest:
    pause = Duration()
    pause.FromTimedelta(timedelta(milliseconds=250))
    return pb.JoinEngineRequest(loaded=pb.WeightsLoaded(order=order, sha256=sha256, pause=pause, fetched_bytes=9))


async def swapping(engine: JoinedEngine, gate: Gate) -> tuple[asyncio.Task[SwapStats], pb.LoadWeights]:
    """Begins a swap; returns it and the order that the agent gets."""
    swap = asyncio.create_task(engine.swap(POLICY, gate))
    order = await engine.next_order()
    assert order is not None
    return swap, order.load


async def test_a_swap_ends_when_the_engine_has_the_weights() -> None:
    engine, gate = JoinedEngine(ABOUT), Gate()
    swap, order = await swapping(engine, gate)
    assert (order.policy_version, order.kind, order.sha256) == (POLICY.name, pb.WEIGHTS_KIND_FULL, SHA)
    engine.hear(loaded(order.order))
    assert await swap == SwapStats(pause_s=0.25, size_bytes=9)


async def test_the_agents_calls_reach_the_proxy_in_their_order() -> None:
    engine, gate = JoinedEngine(ABOUT), Gate()
    swap, order = await swapping(engine, gate)
    calls = (
        pb.GateCall(hold=Duration(seconds=7)),
        pb.GateCall(idle=Duration(seconds=10_000)),
        pb.GateCall(promote=Empty()),
        pb.GateCall(release=Empty()),
    )
    idle = []
    for call in calls:
        call.order = order.order
        engine.hear(pb.JoinEngineRequest(gate=call))
        answer = await engine.next_order()
        assert answer is not None
        idle.append(answer.gate_done.idle)
    assert gate.calls == [("hold", 7.0), ("idle", 600.0), "promote", "release"]
    assert idle == [True, False, True, True]
    engine.hear(loaded(order.order))
    await swap


async def test_an_answer_to_an_earlier_order_is_ignored() -> None:
    engine, gate = JoinedEngine(ABOUT), Gate()
    swap, order = await swapping(engine, gate)
    engine.hear(loaded(order.order - 1, sha256="b" * 64))
    engine.hear(pb.JoinEngineRequest(gate=pb.GateCall(order=order.order - 1, promote=Empty())))
    engine.hear(loaded(order.order))
    await swap
    assert gate.calls == []


@pytest.mark.parametrize(
    "answer",
    [
        pb.JoinEngineRequest(refused=pb.WeightsRefused(order=1, reason="no space")),
        loaded(1, sha256="b" * 64),
    ],
    ids=["refused", "other weights"],
)
async def test_weights_that_an_engine_does_not_have_fail_the_swap(answer: pb.JoinEngineRequest) -> None:
    engine, gate = JoinedEngine(ABOUT), Gate()
    swap, order = await swapping(engine, gate)
    assert order.order == 1
    engine.hear(answer)
    with pytest.raises(EngineFailed, match="gpu-7"):
        await swap


async def test_an_engine_that_leaves_in_the_middle_fails_the_swap() -> None:
    engine, gate = JoinedEngine(ABOUT), Gate()
    swap, _ = await swapping(engine, gate)
    engine.leave()
    with pytest.raises(EngineFailed, match="has left"):
        await swap
    assert await engine.next_order() is None
    assert await engine.ended() == 0
    assert engine.has_left


async def test_a_version_that_it_serves_already_is_not_loaded_again() -> None:
    about = JoiningEngine(engine_id="gpu-7", base_url=ABOUT.base_url, policy_version=3, sha256=SHA)
    engine = JoinedEngine(about)
    await engine.attach(POLICY, engine=EmbeddedEngine(), notify=lambda severity, text: None, gate=Gate())
    engine.leave()
    assert await engine.next_order() is None


async def test_the_proxy_is_told_the_engines_kind_and_key() -> None:
    about = JoiningEngine(engine_id="gpu-7", base_url=ABOUT.base_url, requires_token=True, policy_version=3, sha256=SHA)
    engine = JoinedEngine(about)
    await engine.attach(POLICY, engine=VllmEngine(kind="vllm"), notify=lambda severity, text: None, gate=Gate())
    assert (engine.address.kind, engine.address.key_name) == (EngineKind.VLLM, ENGINE_KEY_NAME)
    assert JoinedEngine(ABOUT).address.key_name == ""


async def test_it_is_healthy_while_its_agent_says_so() -> None:
    now_s = 100.0
    engine = JoinedEngine(ABOUT, clock=lambda: now_s)
    assert not await engine.healthy()
    engine.hear(pb.JoinEngineRequest(status=pb.EngineStatus(healthy=True, sampled_token_count=5)))
    assert await engine.healthy()
    assert await engine.sampled_tokens() == 5
    now_s += SILENCE_LIMIT_S
    assert not await engine.healthy()


async def test_what_it_says_unasked_is_bounded() -> None:
    engine = JoinedEngine(ABOUT)
    for _ in range(MAX_REPORTS):
        engine.hear(loaded(1))
    with pytest.raises(asyncio.QueueFull):
        engine.hear(loaded(1))


async def test_others_fetch_from_it_what_it_was_told_to_fetch_and_all_weights_only_where_it_has_them() -> None:
    engine, gate = JoinedEngine(ABOUT), Gate()
    for version, kind, has_whole in (
        (3, WeightsKind.DELTA, True),
        (4, WeightsKind.DELTA, False),
        (5, WeightsKind.FULL, True),
    ):
        policy = replace(POLICY, version=version, kind=kind)
        swap = asyncio.create_task(engine.swap(policy, gate))
        order = await engine.next_order()
        assert order is not None
        for _ in range(2):  # while it fetches, and when it has the version
            assert engine.may_have(Needed(version))
            assert engine.may_have(Needed(version, whole=True)) is has_whole
            engine.hear(loaded(order.load.order))
            await asyncio.wait([swap])
    swap = asyncio.create_task(engine.swap(replace(POLICY, version=6), gate))
    await engine.next_order()
    # It lags behind.
    assert not engine.may_have(Needed(7))
    engine.leave()
    await asyncio.wait([swap])


async def test_wrong_bytes_of_another_agent_are_told_to_the_run_and_cost_it_a_child() -> None:
    told: list[str] = []
    tree = PeerTree(1)
    parent, child = [
        JoinedEngine(replace(ABOUT, engine_id=name, peer=PeerAddress(name=name, target="10.0.0.7:1", key="k" * 32)))
        for name in ("gpu-7", "gpu-8")
    ]
    for engine in (parent, child):
        tree.join(engine)
        engine.tree = tree
    attaching = asyncio.create_task(
        child.attach(POLICY, engine=EmbeddedEngine(), notify=lambda severity, text: told.append(text), gate=Gate())
    )
    order = await child.next_order()
    assert order is not None
    assert not order.load.HasField("peer")  # the parent does not have it
    child.hear(loaded(order.load.order))
    await attaching
    for has_parent in (True, False):
        swap = asyncio.create_task(child.swap(replace(POLICY, kind=WeightsKind.DELTA), Gate()))
        order = await child.next_order()
        assert order is not None
        assert order.load.HasField("peer") is has_parent
        if has_parent:
            assert (order.load.peer.target, order.load.peer.key) == ("10.0.0.7:1", "k" * 32)
        message = loaded(order.load.order)
        message.loaded.peer_failure = pb.PEER_FAILURE_WRONG
        child.hear(message)
        await swap
    assert len([text for text in told if "gpu-7 sent bytes" in text and "gpu-8" in text]) == 1
