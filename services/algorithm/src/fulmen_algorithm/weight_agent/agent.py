"""Joins a run with one engine, and loads what the run publishes, for as long as the run lasts.

The engine keeps serving while the algorithm service is unavailable; the agent joins again with its version. It ends the
engine, and joins again with a fresh one, if its weights are unknown, it does not answer, or the service ends the stream
without an error: it then has no trust in the engine.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import structlog
from google.protobuf.duration_pb2 import Duration
from google.protobuf.empty_pb2 import Empty
from pydantic import TypeAdapter, ValidationError

from fulmen.algorithm.v1 import engine_service_pb2 as pb
from fulmen.algorithm.v1.engine_service_pb2_grpc import EngineServiceStub
from fulmen.models.peer import PeerFailure
from fulmen_algorithm.clients.membership import Membership, each
from fulmen_algorithm.engines.engine import Engine, EngineFailed, EngineOptions
from fulmen_algorithm.engines.starter import EngineStarter
from fulmen_algorithm.policy.engine_settings import EngineSettings
from fulmen_algorithm.runs.ports import PublishedPolicy, SwapStats
from fulmen_algorithm.weight_agent.fetching import FETCH_ERRORS, Counted, VersionFetcher

STATUS_INTERVAL_S: Final = 4.0
MAX_REASON: Final = 500
FAILED_CHECKS: Final = 3
QUIET_S: Final = 2.0
"""An engine that samples nothing for this time has no calls, seconds."""
REFUSED: Final[tuple[type[Exception], ...]] = (EngineFailed, ValidationError, *FETCH_ERRORS)
ANSWER_LIMIT_S: Final = 1800.0
"""Time for a call of the gate, outages of the proxy included, in seconds."""
_PEER_FAILURES: Final = {
    PeerFailure.NONE: pb.PEER_FAILURE_UNSPECIFIED,
    PeerFailure.SLOW: pb.PEER_FAILURE_SLOW,
    PeerFailure.WRONG: pb.PEER_FAILURE_WRONG,
}
_SETTINGS: Final[TypeAdapter[EngineSettings]] = TypeAdapter(EngineSettings)
_log = structlog.get_logger()


@dataclass(slots=True)
class _Held:
    """The engine of this machine, and what it serves."""

    engine: Engine
    settings: EngineSettings
    policy: PublishedPolicy


class RemoteGate:
    """The gate of one order, whose calls the service carries out; see `engines.engine.SwapGate`. One call at a time."""

    def __init__(self, order: int, say: Callable[[pb.JoinEngineRequest], None]) -> None:
        """`say` sends a message to the service."""
        self._order = order
        self._say = say
        self._answers: asyncio.Queue[pb.GateDone] = asyncio.Queue()

    def answer(self, done: pb.GateDone) -> None:
        """Takes the service's answer."""
        if done.order == self._order:
            self._answers.put_nowait(done)

    async def hold(self, ttl_s: float) -> None:
        """Holds new calls in the proxy, for at most `ttl_s`."""
        await self._call(pb.GateCall(hold=_duration(ttl_s)))

    async def idle(self, limit_s: float) -> bool:
        """Waits until the proxy has no call at the engine; False on timeout."""
        return (await self._call(pb.GateCall(idle=_duration(limit_s)))).idle

    async def promote(self) -> None:
        """Starts attributing tokens to the new version."""
        await self._call(pb.GateCall(promote=Empty()))

    async def release(self) -> None:
        """Releases held calls to the engine."""
        await self._call(pb.GateCall(release=Empty()))

    async def _call(self, call: pb.GateCall) -> pb.GateDone:
        call.order = self._order
        self._say(pb.JoinEngineRequest(gate=call))
        try:
            async with asyncio.timeout(ANSWER_LIMIT_S):
                return await self._answers.get()
        except TimeoutError as error:
            raise EngineFailed("The algorithm service did not answer in the middle of a swap.") from error


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromTimedelta(timedelta(seconds=seconds))
    return duration


class WeightAgent:
    """Background role: one engine of one run."""

    def __init__(
        self,
        *,
        engines: EngineServiceStub,
        hello: pb.EngineHello,
        options: EngineOptions,
        starter: EngineStarter,
        fetcher: VersionFetcher,
        membership: Membership,
    ) -> None:
        """Initializes the agent.

        Args:
            engines: The algorithm service.
            hello: Its description of itself, without a version.
            options: How the engine is started.
            starter: Starts it.
            fetcher: Fetches its weights.
            membership: Joins again, until the run has ended.
        """
        self._engines = engines
        self._hello = hello
        self._options = options
        self._starter = starter
        self._fetcher = fetcher
        self._membership = membership
        self._held: _Held | None = None
        self._leaving, self._left = asyncio.Event(), asyncio.Event()

    async def drain(self) -> None:
        """Leaves the routes of the run's policy, and waits until the engine has no calls. The caller sets the deadline."""
        self._leaving.set()
        await self._left.wait()

    async def run(self) -> None:
        """Serves the run until it has ended.

        Raises:
            FulmenError: if the service refuses the engine, or is away for too long.
        """
        try:
            await self._membership.keep(self._join)
        finally:
            self._left.set()
            await self._stop_engine()

    async def _join(self) -> None:
        """Serves the run for one stream; returns if this side has ended it."""
        if self._leaving.is_set():
            await self._end_calls()
        say: asyncio.Queue[pb.JoinEngineRequest | None] = asyncio.Queue()
        say.put_nowait(pb.JoinEngineRequest(hello=self._said_of_itself()))
        stream = self._engines.JoinEngine(each(say))
        loading: asyncio.Task[None] | None = None
        gate = RemoteGate(0, say.put_nowait)
        statuses = asyncio.create_task(self._tell_status(say), name="engine-status")
        watching = asyncio.create_task(self._until_engine_ends(stream), name="engine-end")
        leaving = asyncio.create_task(self._leave(say), name="engine-leaves")
        try:
            async for message in stream:
                self._membership.heard()
                if message.HasField("gate_done"):
                    gate.answer(message.gate_done)
                    continue
                await _end(loading)
                gate = RemoteGate(message.load.order, say.put_nowait)
                loading = asyncio.create_task(self._load(message.load, gate, say), name="load-weights")
            if self._leaving.is_set():
                await self._end_calls()
            await self._stop_engine()
        except asyncio.CancelledError:
            if not watching.done() or watching.cancelled():
                raise
            _log.warning("engine_ended")
            await self._stop_engine()
        finally:
            stream.cancel()
            for task in (loading, statuses, watching, leaving):
                await _end(task)

    async def _leave(self, say: "asyncio.Queue[pb.JoinEngineRequest | None]") -> None:
        """Ends its messages when the agent is to leave; the service then ends the stream, once the proxy has no call here."""
        await self._leaving.wait()
        _log.info("leaving")
        say.put_nowait(None)

    async def _end_calls(self) -> None:
        """Waits until the engine has no calls, also of proxies that have not heard yet, and then until it is cancelled."""
        sampled, held = -1, self._held
        with suppress(EngineFailed):
            while held is not None and sampled != (sampled := await held.engine.sampled_tokens()):  # noqa: ASYNC110
                await asyncio.sleep(QUIET_S)
        self._left.set()
        await asyncio.Event().wait()

    def _said_of_itself(self) -> pb.EngineHello:
        hello = pb.EngineHello()
        hello.CopyFrom(self._hello)
        if self._held is not None:
            hello.policy_version, hello.sha256 = self._held.policy.version, self._held.policy.sha256
        return hello

    async def _load(
        self, order: pb.LoadWeights, gate: RemoteGate, say: "asyncio.Queue[pb.JoinEngineRequest | None]"
    ) -> None:
        fetched = Counted()
        _log.info("weights_ordered", policy_version=order.policy_version, from_peer=order.HasField("peer"))
        try:
            settings = _SETTINGS.validate_json(order.engine_json)
            loaded_sha256 = "" if self._held is None else self._held.policy.sha256
            policy = await self._fetcher.fetch(order, loaded_sha256=loaded_sha256, fetched=fetched)
            _log.info("weights_fetched", version=policy.version, kind=policy.kind.value)
            stats = await self._loaded(policy, settings, gate)
        except REFUSED as error:
            _log.warning("weights_refused", version=order.policy_version, reason=str(error)[:MAX_REASON])
            refused = pb.WeightsRefused(order=order.order, reason=_reason(error))
            say.put_nowait(pb.JoinEngineRequest(refused=refused))
            return
        _log.info(
            "weights_loaded",
            version=policy.version,
            sha256=policy.sha256,
            fetched_bytes=fetched.size_bytes,
            peer_bytes=fetched.peer_bytes,
        )
        loaded = pb.WeightsLoaded(
            order=order.order,
            sha256=policy.sha256,
            pause=_duration(stats.pause_s),
            fetched_bytes=fetched.size_bytes,
            peer_bytes=fetched.peer_bytes,
            peer_failure=_PEER_FAILURES[fetched.peer_failure],
        )
        say.put_nowait(pb.JoinEngineRequest(loaded=loaded))

    async def _loaded(self, policy: PublishedPolicy, settings: EngineSettings, gate: RemoteGate) -> SwapStats:
        """Gives the engine a version; starts it if there is none, or it takes no weights in place."""
        held, self._held = self._held, None  # unknown weights, unless all goes well
        if held is not None and held.settings == settings:
            try:
                stats = await held.engine.swap(policy, gate)
            except EngineFailed as error:
                _log.warning("swap_failed", version=policy.version, reason=str(error))
                await held.engine.stop()
            except BaseException:
                await held.engine.stop()
                raise
            else:
                self._held = _Held(held.engine, settings, policy)
                return stats
        elif held is not None:
            await held.engine.stop()
        engine = await self._starter.start(self._options, policy, engine=settings, notify=_log_notice, gate=gate)
        self._held = _Held(engine, settings, policy)
        return SwapStats()

    async def _tell_status(self, say: "asyncio.Queue[pb.JoinEngineRequest | None]") -> None:
        """Reports the state of the engine; stops an engine that has not answered several times."""
        silent = 0
        while True:
            status, held = pb.EngineStatus(), self._held
            if held is not None:
                with suppress(EngineFailed):
                    status.sampled_token_count = await held.engine.sampled_tokens()
                    status.healthy = True
            say.put_nowait(pb.JoinEngineRequest(status=status))
            silent = 0 if status.healthy or held is None else silent + 1
            if held is not None and silent == FAILED_CHECKS:
                await held.engine.stop()
            await asyncio.sleep(STATUS_INTERVAL_S)

    async def _until_engine_ends(self, stream: object) -> None:
        """Waits until the engine that serves has ended, then ends the stream."""
        while True:
            held = self._held
            if held is None:
                await asyncio.sleep(STATUS_INTERVAL_S / 4)
                continue
            await held.engine.ended()
            if self._held is held:
                stream.cancel()  # type: ignore[attr-defined]
                return

    async def _stop_engine(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.engine.stop()


async def _end(task: "asyncio.Task[None] | None") -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait([task])


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "The settings of the run's engine belong to another release."
    if isinstance(error, OSError):
        return f"The weights cannot be stored: {error.strerror or type(error).__name__}."
    return str(error)[:MAX_REASON]


def _log_notice(severity: str, message: str) -> None:
    _log.info("engine_notice", severity=severity, text=message)
