"""An engine on another machine, behind the stream of its weight agent; see `EngineService`.

Its agent fetches and checks weights, and swaps them in. What a swap does at the proxy is done from here, on the agent's call.
"""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

import structlog
from google.protobuf.duration_pb2 import Duration

from fulmen.algorithm.v1 import engine_service_pb2 as pb
from fulmen_algorithm.clients.joined_stream import JoinedStream
from fulmen_algorithm.engines.engine import (
    ENGINE_KEY_NAME,
    EngineAddress,
    EngineFailed,
    EngineKind,
    EngineOptions,
    SwapGate,
)
from fulmen_algorithm.engines.peers import Needed, Parent, PeerAddress, PeerTree
from fulmen_algorithm.policy.engine_settings import EmbeddedEngine, EngineSettings, VllmEngine
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy, SwapStats
from fulmen_algorithm.training.settings import WeightsKind

LOAD_DEADLINE_S = 1800.0
"""Time for fetching a version and loading it, in seconds. A run does not wait so long; see `laggards`."""
SILENCE_LIMIT_S = 20.0
"""Time without a message after which an engine is lost, in seconds: four statuses."""
MAX_REASON = 500
MAX_REPORTS = 64
MAX_GATE_WAIT_S = 600.0

KINDS = {
    WeightsKind.FULL: pb.WEIGHTS_KIND_FULL,
    WeightsKind.DELTA: pb.WEIGHTS_KIND_DELTA,
    WeightsKind.LORA: pb.WEIGHTS_KIND_LORA,
}
_log = structlog.get_logger()
Report = pb.GateCall | pb.WeightsLoaded | pb.WeightsRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class JoiningEngine:
    """Description that an engine gives of itself when it joins.

    Attributes:
        engine_id: Its id among the engines of the run.
        base_url: Base URL of its OpenAI API.
        requires_token: Whether it requires the deployment's engine token.
        policy_version: Version that it serves already; 0 for none.
        sha256: Checksum of that version's weights.
        peer: Where other agents fetch what its agent has.
    """

    engine_id: str
    base_url: str
    requires_token: bool = False
    policy_version: int = 0
    sha256: str = ""
    peer: PeerAddress = field(default_factory=PeerAddress)


class JoinedEngine(JoinedStream[pb.JoinEngineResponse]):
    """See `engines.engine.Engine`. One swap at a time.

    Attributes:
        about: Its description of itself.
        tree: From which it learns whence it fetches.
    """

    def __init__(self, about: JoiningEngine, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` only grows, seconds."""
        super().__init__(clock=clock)
        self.about = about
        self.tree = PeerTree(0)
        self._notify: Notify = _nobody
        self._fetching = 0
        self._has_weights = False
        self._whole = 0
        self._settings: EngineSettings = EmbeddedEngine()
        self._status = pb.EngineStatus()
        self._order = 0
        self._reports: asyncio.Queue[Report] = asyncio.Queue(MAX_REPORTS)

    @property
    def pid(self) -> int:
        """See `Engine`: not a process of this machine."""
        return 0

    @property
    def address(self) -> EngineAddress:
        """Address for the proxy."""
        is_vllm = isinstance(self._settings, VllmEngine)
        return EngineAddress(
            base_url=self.about.base_url,
            kind=EngineKind.VLLM if is_vllm else EngineKind.FULMEN,
            key_name=ENGINE_KEY_NAME if self.about.requires_token else "",
        )

    async def attach(self, policy: PublishedPolicy, *, engine: EngineSettings, notify: Notify, gate: SwapGate) -> None:
        """Makes it serve a version; one that it serves already is not loaded again.

        Args:
            policy: The version.
            engine: Kind and settings of the run's engines.
            notify: Receives a notice about the wait.
            gate: The proxy's part.

        Raises:
            EngineFailed: if it refuses the weights, or leaves.
        """
        about, self._settings, self._notify = self.about, engine, notify
        if about.policy_version == policy.version and policy.sha256 and about.sha256 == policy.sha256:
            return
        notify("info", f"The engine {about.engine_id} is fetching version {policy.version}.")
        await self._load(policy, gate)

    async def ended(self) -> int:
        """Waits until its agent has left."""
        await self.left()
        return 0

    async def sampled_tokens(self) -> int:
        """Returns the number of sampled tokens, as its agent last reported."""
        return int(self._status.sampled_token_count)

    async def healthy(self) -> bool:
        """Returns whether its agent sent a status recently and reports that the engine responds."""
        return self.silent_s < SILENCE_LIMIT_S and self._status.healthy

    async def swap(self, policy: PublishedPolicy, gate: SwapGate) -> SwapStats:
        """Makes it fetch and load a version.

        Raises:
            EngineFailed: if it refuses, leaves, or does not finish in time.
        """
        return await self._load(policy, gate)

    async def _load(self, policy: PublishedPolicy, gate: SwapGate) -> SwapStats:
        self._order += 1
        self._fetching = policy.version
        needed = Needed(policy.version, policy.kind is WeightsKind.FULL or self._begins_with(policy))
        self._whole = policy.version if needed.whole else 0
        parent = self.tree.parent_of(self, needed)
        self.tell(pb.JoinEngineResponse(load=self._order_of(policy, parent)))
        try:
            async with asyncio.timeout(LOAD_DEADLINE_S):
                return await self._swapped(policy, gate, parent)
        except TimeoutError as error:
            text = (
                f"The engine {self.about.engine_id} did not load version {policy.version} in {LOAD_DEADLINE_S:.0f} s."
            )
            raise EngineFailed(text) from error
        finally:
            self._fetching = 0

    async def _swapped(self, policy: PublishedPolicy, gate: SwapGate, parent: Parent | None) -> SwapStats:
        while True:
            report = await self._next_report()
            if report.order != self._order:
                continue  # of an order that was given up
            match report:
                case pb.GateCall():
                    idle = await _carry_out(report, gate)
                    done = pb.GateDone(order=self._order, idle=idle)
                    self.tell(pb.JoinEngineResponse(gate_done=done))
                case pb.WeightsRefused():
                    raise EngineFailed(f"The engine {self.about.engine_id}: {report.reason[:MAX_REASON]}")
                case pb.WeightsLoaded():
                    if parent is not None and report.peer_failure:
                        self._complain(parent, policy, report)
                    if policy.sha256 not in ("", report.sha256):
                        text = "has loaded weights that differ from"
                        raise EngineFailed(f"The engine {self.about.engine_id} {text} version {policy.version}.")
                    self._has_weights = True
                    return SwapStats(
                        pause_s=report.pause.ToTimedelta().total_seconds(), size_bytes=int(report.fetched_bytes)
                    )

    async def _next_report(self) -> Report:
        reading = asyncio.ensure_future(self._reports.get())
        leaving = asyncio.ensure_future(self.left())
        try:
            await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if self.has_left:
                raise EngineFailed(f"The engine {self.about.engine_id} has left.")
            return reading.result()
        finally:
            reading.cancel()
            leaving.cancel()

    def _complain(self, parent: Parent, policy: PublishedPolicy, report: pb.WeightsLoaded) -> None:
        """Gets another parent from now on."""
        self.tree.failed(self, parent.engine)
        failure, named = pb.PeerFailure.Name(report.peer_failure), parent.engine.peer.name
        _log.warning("peer_failed", engine=self.about.engine_id, peer=named, failure=failure)
        if report.peer_failure == pb.PEER_FAILURE_WRONG:
            text = f"sent bytes of version {policy.version} that differ from the published ones; the rest was fetched from the service."
            self._notify("warning", f"The engine {named} {text} Detected by {self.about.engine_id}.")

    def _order_of(self, policy: PublishedPolicy, parent: Parent | None) -> pb.LoadWeights:
        # Its agent knows its machine, and where it is of no concern to it.
        settings = self._settings.model_dump(mode="json", exclude={"replicas", "cluster", "gpus"})
        return pb.LoadWeights(
            order=self._order,
            policy_version=policy.name,
            kind=KINDS[policy.kind],
            sha256=policy.sha256,
            base_version=policy.base_version,
            base_sha256=policy.base_sha256,
            adapters=list(policy.adapters),
            engine_json=json.dumps(settings),
            peer=None if parent is None else _peer(parent),
        )

    # In the tree.

    @property
    def peer(self) -> PeerAddress:
        """See `peers.TreeMember`."""
        return self.about.peer

    def may_have(self, needed: Needed) -> bool:
        """See `peers.TreeMember`."""
        lags = 0 < self._fetching < needed.version
        return not lags and (not needed.whole or self._whole == needed.version)

    def _begins_with(self, policy: PublishedPolicy) -> bool:
        """Returns whether it has no weights to which a difference applies."""
        return policy.kind is WeightsKind.DELTA and not (self._has_weights or self.about.policy_version)

    async def stop(self) -> None:
        """Ends the stream; its agent decides what becomes of the engine."""
        self.leave()

    def hear(self, message: pb.JoinEngineRequest) -> None:
        """Takes a message of the agent.

        Raises:
            asyncio.QueueFull: if it sends more answers than were requested.
        """
        self.heard()
        match message.WhichOneof("message"):
            case "status":
                self._status = message.status
            case "gate" | "loaded" | "refused" as name:
                self._reports.put_nowait(getattr(message, name))


def _nobody(severity: str, message: str) -> None:
    """Receives notices before there is a run to record them."""


def _peer(parent: Parent) -> pb.Peer:
    address, patience = parent.engine.peer, Duration()
    patience.FromTimedelta(timedelta(seconds=parent.patience_s))
    return pb.Peer(target=address.target, key=address.key, patience=patience)


async def _carry_out(call: pb.GateCall, gate: SwapGate) -> bool:
    match call.WhichOneof("call"):
        case "hold":
            await gate.hold(_limited(call.hold.ToTimedelta()))
        case "idle":
            return await gate.idle(_limited(call.idle.ToTimedelta()))
        case "promote":
            await gate.promote()
        case "release":
            await gate.release()
    return True


def _limited(asked: timedelta) -> float:
    return min(max(asked.total_seconds(), 0.0), MAX_GATE_WAIT_S)


class JoinedStarter:
    """See `engines.engine.Starter`: has the engine that has joined, and no other when that one has left."""

    def __init__(self, engine: JoinedEngine) -> None:
        self._engine = engine

    async def start(
        self,
        options: EngineOptions,
        policy: PublishedPolicy,
        *,
        engine: EngineSettings,
        notify: Notify,
        gate: SwapGate,
    ) -> JoinedEngine:
        """Makes the engine serve a version.

        Raises:
            EngineFailed: if it has left, or refuses the weights.
        """
        if self._engine.has_left:
            raise EngineFailed(f"The engine {self._engine.about.engine_id} has left.")
        await self._engine.attach(policy, engine=engine, notify=notify, gate=gate)
        return self._engine
