"""Engines on clusters: each is a group of one process, a weight agent with its engine, which joins by its own stream.

A lost engine is one that has ended: its supervisor starts another group. Invariant: no group outlives its engine.
"""

import asyncio
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from fulmen.errors import EngineExists, FulmenError
from fulmen_algorithm.cluster.port import (
    Cluster,
    ClusterFailed,
    GroupOrder,
    PlacementRefused,
    ProcessGroup,
    Resources,
    Wishes,
)
from fulmen_algorithm.cluster.wire import write_note
from fulmen_algorithm.engines.engine import EngineAddress, EngineFailed, EngineOptions, SwapGate
from fulmen_algorithm.engines.joined import JoinedEngine
from fulmen_algorithm.policy.engine_settings import EngineSettings, ExternalEngine, StartedEngine, VllmEngine
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy, SwapStats
from fulmen_algorithm.training.compute import THIS_MACHINE

MODULE = "fulmen_algorithm.weight_agent.on_cluster"
ARRIVAL_DEADLINE_S = 300.0
"""Time from the start of its process until an engine joins, in seconds."""
_ID_BYTES = 5
_log = structlog.get_logger()


class Tokens(Protocol):
    """Issues tokens of engines."""

    async def issue(self, run: str, engine_id: str, notify: Notify) -> str:
        """Issues the token of an engine of a run; see `clients.engine_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """What engines on clusters need of the service.

    Attributes:
        clusters: The clusters, by name.
        tokens: Issues their tokens.
        agent_settings: Settings of their weight agents, by variable, besides those of one engine.
    """

    clusters: Mapping[str, Cluster]
    tokens: Tokens
    agent_settings: Callable[[], Mapping[str, str]] = field(repr=False)


class ClusterEngines:
    """The engines that the service has on clusters, and those that it awaits."""

    def __init__(self, access: ClusterAccess) -> None:
        """Starts none yet."""
        self._access = access
        self._awaited: dict[tuple[str, str], asyncio.Future[JoinedEngine]] = {}

    def starter(self, run: str) -> "ClusterStarter":
        """Returns what starts engines of a run."""
        return ClusterStarter(self, self._access, run)

    def knows(self, run: str, engine_id: str) -> bool:
        """Returns whether an engine of a run is one of these."""
        return (run, engine_id) in self._awaited

    def arrive(self, run: str, engine: JoinedEngine) -> None:
        """Takes an engine that is awaited.

        Raises:
            EngineExists: if it has arrived before: a lost one is started again.
        """
        arrival = self._awaited[run, engine.about.engine_id]
        if arrival.done():
            name = engine.about.engine_id
            raise EngineExists(f"The engine {name} of {run} joined before and is started again.", engine=name)
        arrival.set_result(engine)

    @contextmanager
    def awaiting(self, run: str) -> Iterator[tuple[str, asyncio.Future[JoinedEngine]]]:
        """Makes an id, under which an engine is known until the block fails, or `forget`."""
        engine_id = f"on-cluster-{secrets.token_hex(_ID_BYTES)}"
        self._awaited[run, engine_id] = arrival = asyncio.get_running_loop().create_future()
        try:
            yield engine_id, arrival
        except BaseException:
            self.forget(run, engine_id)
            raise

    def forget(self, run: str, engine_id: str) -> None:
        """Forgets an engine that has ended."""
        self._awaited.pop((run, engine_id), None)


class ClusterStarter:
    """See `engines.engine.Starter`."""

    def __init__(self, engines: ClusterEngines, access: ClusterAccess, run: str) -> None:
        self._engines = engines
        self._access = access
        self._run = run

    async def start(
        self,
        options: EngineOptions,
        policy: PublishedPolicy,
        *,
        engine: EngineSettings,
        notify: Notify,
        gate: SwapGate,
    ) -> "ClusterEngine":
        """Has an engine started on its cluster, and waits until it serves a version.

        Raises:
            EngineFailed: if it is not started, does not join in time, or refuses the weights.
        """
        assert isinstance(engine, StartedEngine)
        if engine.cluster not in self._access.clusters:
            there = ", ".join(sorted(self._access.clusters)) or "none"
            raise EngineFailed(f"This service no longer has cluster {engine.cluster!r}; it has {there}.")
        notify("info", f"An engine is starting on cluster {engine.cluster!r}.")
        with self._engines.awaiting(self._run) as (engine_id, arrival):
            order = engine_order(engine, options.device, threads=options.torch_threads)
            own = {"ENGINE_ID": engine_id, "DEVICE": "cuda" if order.wishes.each.gpus or _nodes(engine) > 1 else "cpu"}
            agent = _Agent(self._access, self._run, own, notify)
            try:
                group = await self._access.clusters[engine.cluster].start(order, agent.welcome)
            except (ClusterFailed, PlacementRefused) as error:
                raise EngineFailed(f"The engine was not started on cluster {engine.cluster!r}: {error}") from error
            try:
                joined = await _arrived(arrival, group, agent)
                notify("info", f"The engine {engine_id} has joined from {group.members[0].node}.")
                await joined.attach(policy, engine=engine, notify=notify, gate=gate)
            except BaseException:
                agent.close()
                await group.end()
                raise
        return ClusterEngine(joined, group, agent, forget=lambda: self._engines.forget(self._run, engine_id))


class _Agent:
    """The connection of the process of one engine, which ends when this does."""

    def __init__(self, access: ClusterAccess, run: str, own: Mapping[str, str], notify: Notify) -> None:
        """`own` are settings of this agent."""
        self._access = access
        self._run = run
        self._own = own
        self._notify = notify
        self._writers: list[StreamWriter] = []
        self.refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def welcome(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Sends the process its settings, with a fresh token: it may have waited long in a cluster's queue."""
        self._writers.append(writer)
        try:
            token = await self._access.tokens.issue(self._run, self._own["ENGINE_ID"], self._notify)
        except (FulmenError, OSError) as error:
            if not self.refused.done():
                self.refused.set_result(f"Its token was not issued: {error}")
            writer.close()
            return
        write_note(writer, {"settings": {**self._access.agent_settings(), **self._own, "TOKEN": token}})

    def close(self) -> None:
        """Ends the connection."""
        for writer in self._writers:
            writer.close()


class ClusterEngine:
    """See `engines.engine.Engine`: one that has joined, and its group."""

    def __init__(self, joined: JoinedEngine, group: ProcessGroup, agent: _Agent, *, forget: Callable[[], None]) -> None:
        """Use `ClusterStarter.start`; `forget` is called at its end."""
        self._joined = joined
        self._group = group
        self._agent = agent
        self._forget = forget

    @property
    def pid(self) -> int:
        """Process id on its machine."""
        return self._group.members[0].pid

    @property
    def address(self) -> EngineAddress:
        """Address for the proxy."""
        return self._joined.address

    async def ended(self) -> int:
        """Waits until its process has ended, its machine is silent, or it has left; returns 0."""
        ends = [
            asyncio.create_task(self._group.ended(), name="engine-process-ends"),
            asyncio.create_task(self._joined.ended(), name="engine-leaves"),
        ]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if ends[0].done():
                _log.warning("engine_on_cluster_lost", engine=self._joined.about.engine_id, reason=ends[0].result())
        finally:
            for end in ends:
                end.cancel()
        return 0

    async def sampled_tokens(self) -> int:
        """See `Engine`."""
        return await self._joined.sampled_tokens()

    async def healthy(self) -> bool:
        """See `Engine`."""
        return await self._joined.healthy()

    async def swap(self, policy: PublishedPolicy, gate: SwapGate) -> SwapStats:
        """See `Engine`."""
        return await self._joined.swap(policy, gate)

    async def stop(self) -> None:
        """Ends it and its group."""
        self._joined.leave()
        self._agent.close()
        try:
            await self._group.end()
        finally:
            self._forget()


def is_on_cluster(engine: EngineSettings) -> bool:
    """Returns whether engines are on a cluster, rather than on this machine or someone else's."""
    return not isinstance(engine, ExternalEngine) and engine.cluster != THIS_MACHINE


def engine_order(engine: StartedEngine, device: str, *, threads: int) -> GroupOrder:
    """Returns the order for one engine on a cluster: a process, with GPUs if the run requests them or the service has
    some.

    An engine over several machines gets its GPUs from the cluster by itself.
    """
    gpus = 0 if _nodes(engine) > 1 else _gpus(engine, device)
    return GroupOrder(
        module=MODULE,
        count=1,
        environment={"OMP_NUM_THREADS": str(threads), "TQDM_DISABLE": "1", "PYTHONSAFEPATH": "1"},
        wishes=Wishes(each=Resources(cpus=1, gpus=gpus)),
    )


def engines_plan(engine: StartedEngine, device: str) -> GroupOrder:
    """Returns all that a cluster needs for the engines of a run, as one group, to plan with."""
    # Each of them is placed by itself.
    wishes = Wishes(each=Resources(cpus=1, gpus=_gpus(engine, device)), together=1)
    return GroupOrder(module=MODULE, count=engine.replicas * _nodes(engine), wishes=wishes)


def _gpus(engine: StartedEngine, device: str) -> int:
    has_gpus = engine.gpus is not None or _nodes(engine) > 1 or device.startswith("cuda")
    return engine.gpus_of_each if has_gpus else 0


def _nodes(engine: StartedEngine) -> int:
    return engine.nodes if isinstance(engine, VllmEngine) else 1


async def _arrived(arrival: asyncio.Future[JoinedEngine], group: ProcessGroup, agent: _Agent) -> JoinedEngine:
    ending = asyncio.create_task(group.ended(), name="engine-process-ends")
    ways: set[asyncio.Future[Any]] = {arrival, ending, agent.refused}
    try:
        async with asyncio.timeout(ARRIVAL_DEADLINE_S):
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        if arrival.done():
            return arrival.result()
        raise EngineFailed(
            agent.refused.result() if agent.refused.done() else f"The engine did not join: {ending.result()}."
        )
    except TimeoutError:
        raise EngineFailed(f"The engine did not join within {ARRIVAL_DEADLINE_S:g} s.") from None
    finally:
        ending.cancel()
