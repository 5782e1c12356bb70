"""Background role: the engines of the served policies, up to the limit of engines.

Invariant: an engine whose run is active is never retired. The engines of an ended run keep serving until their slots are
needed; those of the policy that was used least recently are then retired. The served versions are stored on disk and restored when the
service restarts, without their runs.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import structlog

from fulmen.errors import EngineExists, QuotaExceeded, TrainingRunStateInvalid, Unavailable
from fulmen.rpc.channel import FulmenChannel
from fulmen_algorithm.clients.patience import Patience
from fulmen_algorithm.engines.engine import EngineOptions, Starter
from fulmen_algorithm.engines.joined import JoinedEngine, JoinedStarter
from fulmen_algorithm.engines.on_clusters import ClusterEngines, is_on_cluster
from fulmen_algorithm.engines.proxy_admin import PolicyRoutes, ProxyAdmin, backend_id
from fulmen_algorithm.engines.replicas import JOINED_FROM, EngineSet
from fulmen_algorithm.engines.supervisor import REFUSED_OR_AWAY, EngineSupervisor, log_only
from fulmen_algorithm.policy.engine_settings import MAX_REPLICAS, EngineSettings, ExternalEngine, each_engine
from fulmen_algorithm.policy.served import ServedPolicies, ServedPolicy
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import EngineCount, Notify, PublishedPolicy, SwapStats

_log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class _Place:
    """The slots of a policy.

    Attributes:
        project: Project of the policy.
        engines: Its engines.
        numbers: Slot of each that this service starts, from 0, by its place in the set; determines its port, unless ports
            are chosen freely.
        joined: Place of each engine of another machine in the set, by its id.
        run: The active run that uses it; empty if none.
        made_for: The run of its engines on a cluster, whose weights alone they may fetch; empty for engines elsewhere.
    """

    project: str
    engines: EngineSet
    routes: PolicyRoutes
    numbers: dict[int, int] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)
    run: str = ""
    made_for: str = ""


class EnginePool:
    """The engines of the service."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        starter: Starter,
        on_clusters: ClusterEngines | None = None,
        proxy: FulmenChannel,
        backend_prefix: str,
        file: ServedPolicies,
        max_engines: int,
        outage_limit_s: float,
        still_serves: Callable[[str], Awaitable[bool]],
    ) -> None:
        """Initializes the pool.

        Args:
            options: How engines are started; its port is that of the first engine, and the others follow.
            starter: Starts engines on this machine.
            on_clusters: Starts engines on clusters; None if there are none.
            proxy: Channel to the LLM proxy.
            backend_prefix: Prefix of the engines' backend ids at the proxy.
            file: Storage of the served versions.
            max_engines: Number of slots.
            outage_limit_s: Maximum wait for the proxy, in seconds.
            still_serves: Returns whether no other service has run a policy since this one served it.
        """
        self._options = options
        self._starter = starter
        self._on_clusters = on_clusters
        self._proxy = proxy
        self._backend_prefix = backend_prefix
        self._file = file
        self._max_engines = max_engines
        self._outage_limit_s = outage_limit_s
        self._still_serves = still_serves
        self._places: dict[str, _Place] = {}
        self._placing = asyncio.Lock()
        self._new: asyncio.Queue[EngineSupervisor] = asyncio.Queue()

    def serving(self, run: str, project: str, engine: EngineSettings, notify: Notify) -> "RunServing":
        """Returns the serving interface of a run."""
        return RunServing(self, run, project, engine, notify)

    async def run(self) -> None:
        """Restores the engines of the previous process, and supervises all engines until cancelled."""
        async with asyncio.TaskGroup() as watching:
            for served in self._file.load():
                watching.create_task(self._restore(served), name=f"restore {served.policy.policy}")
            while True:
                supervisor = await self._new.get()
                watching.create_task(supervisor.run(), name="engine")

    async def place(self, served: ServedPolicy, run: str, notify: Notify) -> EngineSet:
        """Returns the engines of a policy, in new slots as far as necessary, and assigns them to the run.

        Raises:
            RunFailed: if there are too few slots beside those of active runs, or a model name is in use outside the project.
        """
        policy = served.policy.policy
        async with self._placing:
            await self._require_names(served.policy, served.project, notify)
            # The engines of another project, whose route was deleted, or of another run, which cannot fetch this one's weights.
            former = self._places.get(policy)
            if former is not None and (former.project, former.made_for) != (served.project, _made_for(served)):
                await self._retire(policy)
            await self._make_room(policy, len(each_engine(served.engine)))
            place = self._reserve(served)
            place.run = run
            return place.engines

    async def join(self, run: str, engine: JoinedEngine) -> None:
        """Serves the policy of an active run with an engine of another machine, until it leaves.

        Raises:
            Unavailable: if the run serves no policy yet, or the engine does not take its weights.
            EngineExists: if another engine of the run has the id.
            QuotaExceeded: if the policy has as many engines as its routes may have targets.
            TrainingRunStateInvalid: if the run's engines are external, which none joins.
        """
        if self._on_clusters is not None and self.awaits(run, engine.about.engine_id):
            self._on_clusters.arrive(run, engine)
            await engine.ended()
            return
        place = next((place for place in self._places.values() if place.run == run), None)
        served = None if place is None else place.engines.served
        if place is None or served is None:
            raise Unavailable(f"{run} serves no policy yet: join again.")
        if isinstance(served.engine, ExternalEngine):
            raise TrainingRunStateInvalid(f"The engines of {run} are external: others cannot join.", training_run=run)
        engine_id, policy = engine.about.engine_id, served.policy.policy
        if engine_id in place.joined:
            raise EngineExists(f"Another engine of {run} has the id {engine_id}.", engine=engine_id)
        if len(place.engines.members) >= MAX_REPLICAS:
            raise QuotaExceeded(f"{run} has {MAX_REPLICAS} engines, the maximum for a policy.", quota="engines")
        index = next(index for index in count(JOINED_FROM) if index not in place.joined.values())
        place.joined[engine_id] = index
        member = self._new_member(place, policy, index, starter=JoinedStarter(engine))
        try:
            served = replace(served, engine=each_engine(served.engine)[0])
            await place.engines.add(index, member, served, place.engines.notify)
            await engine.ended()
        except RunFailed as error:
            raise Unavailable(error.message) from error
        finally:
            engine.leave()
            await place.engines.remove(index)
            del place.joined[engine_id]

    def awaits(self, run: str, engine_id: str) -> bool:
        """Returns whether an engine of a run is one that this service has started on a cluster."""
        return self._on_clusters is not None and self._on_clusters.knows(run, engine_id)

    async def is_taken(self, policy: str, project: str) -> bool:
        """Returns whether the name of a policy is in use outside its project; False if the proxy cannot be asked."""
        try:
            return await PolicyRoutes(self._proxy, project=project).is_taken(policy)
        except REFUSED_OR_AWAY:
            return False  # asked again before the policy is served

    def release(self, policy: str, run: str) -> None:
        """Marks a run as ended; its engines keep serving until their slots are needed."""
        place = self._places.get(policy)
        if place is not None and place.run == run:
            place.run = ""
            place.engines.leave()

    def hand_over(self, policy: str) -> None:
        """Leaves a policy to another service, which runs it now; its engines here end when their slots are needed."""
        place = self._places.get(policy)
        if place is not None and not place.engines.handed_over:
            _log.warning("policy_handed_over", policy=policy)
            place.run = ""
            place.engines.hand_over()
            self.keep()

    def served_besides(self, policy: str) -> tuple[EngineSettings | None, Mapping[str, EngineSettings]]:
        """Returns the settings of a policy's engines, and those of policies without an active run, by policy."""
        served = {name: place.engines.served for name, place in self._places.items()}
        idle = {name: each.engine for name, each in served.items() if each is not None and not self._places[name].run}
        own = served.get(policy)
        idle.pop(policy, None)
        return None if own is None else own.engine, idle

    async def make_room(self, policies: Sequence[str]) -> None:
        """Ends the engines of policies, of those without an active run."""
        async with self._placing:
            for policy in policies:
                if policy in self._places and not self._places[policy].run:
                    await self._retire(policy)

    def engines_of(self, run: str) -> EngineCount:
        """Returns how many engines an active run has; none for another."""
        return next((place.engines.readiness for place in self._places.values() if place.run == run), EngineCount())

    def keep(self) -> None:
        """Stores the served versions."""
        kept = [place.engines for place in self._places.values() if not place.engines.handed_over]
        self._file.save([each.served for each in kept if each.served is not None])

    async def _require_names(self, published: PublishedPolicy, project: str, notify: Notify) -> None:
        proxy = PolicyRoutes(self._proxy, project=project)
        patience = Patience(service="LLM proxy", notify=notify, limit_s=self._outage_limit_s)
        for name in published.model_names:
            if await patience.call(partial(proxy.is_taken, name)):
                raise RunFailed(
                    f"The model name {name!r} is in use outside {project}. Choose another name for the policy."
                )

    def _reserve(self, served: ServedPolicy) -> _Place:
        """Returns the slots of a policy, of which there are at least as many as it needs; engines are started later."""
        policy = served.policy.policy
        if policy not in self._places:
            routes = PolicyRoutes(self._proxy, project=served.project)
            self._places[policy] = _Place(
                project=served.project, engines=EngineSet(routes), routes=routes, made_for=_made_for(served)
            )
        place = self._places[policy]
        starter = self._starter
        if place.made_for:
            assert self._on_clusters is not None, "runs may name clusters"
            starter = self._on_clusters.starter(place.made_for)
        for index in range(len(each_engine(served.engine))):
            if index not in place.engines.members:
                place.numbers[index] = self._free_number()
                place.engines.members[index] = self._new_member(place, policy, index, starter=starter)
        return place

    def _free_number(self) -> int:
        taken = {
            number
            for place in self._places.values()
            for index, number in place.numbers.items()
            if index in place.engines.members
        }
        return next(number for number in count() if number not in taken)

    def _new_member(self, place: _Place, policy: str, index: int, *, starter: Starter) -> EngineSupervisor:
        port = self._options.port + place.numbers.get(index, 0) if self._options.port else 0
        supervisor = EngineSupervisor(
            replace(self._options, port=port, log_suffix=f".{index}" if index else ""),
            ProxyAdmin(self._proxy, backend_id=backend_id(self._backend_prefix, policy, index), routes=place.routes),
            outage_limit_s=self._outage_limit_s,
            starter=starter,
        )
        self._new.put_nowait(supervisor)
        return supervisor

    def _others(self, policy: str) -> int:
        """Returns how many engines of this service other policies have."""
        return sum(place.engines.own_count for name, place in self._places.items() if name != policy)

    async def _make_room(self, policy: str, wanted: int) -> None:
        """Retires policies without runs until a policy can have as many engines as it wants."""
        while self._others(policy) + wanted > self._max_engines:
            idle = {name: place for name, place in self._places.items() if not place.run and name != policy}
            active = self._others(policy) - sum(place.engines.own_count for place in idle.values())
            if active + wanted > self._max_engines:
                raise RunFailed(
                    f"The run needs {wanted} of the service's {self._max_engines} engines (setting max_engines); "
                    f"{active} serve policies of active runs."
                )
            await self._retire(min(idle, key=lambda name: idle[name].engines.last_used))

    async def _retire(self, policy: str) -> None:
        _log.info("engines_make_room", policy=policy)
        engines = self._places[policy].engines
        try:
            await engines.retire()
        finally:
            # Shielded from the caller's cancellation: a retired engine has no supervisor.
            if engines.retired:
                del self._places[policy]
                self.keep()

    async def _restore(self, served: ServedPolicy) -> None:
        policy = served.policy.policy
        if not await self._still_serves(policy):
            _log.info("policy_served_elsewhere", policy=policy)
            return
        async with self._placing:
            if policy in self._places or self._others(policy) + len(each_engine(served.engine)) > self._max_engines:
                return  # a run was quicker, or the limit is lower now
            engines = self._reserve(served).engines
        try:
            await engines.restore(served, log_only)
        except RunFailed as error:
            _log.warning("policy_not_served_again", policy=policy, version=served.policy.version, reason=error.message)
        except Exception as error:  # noqa: BLE001  (any error concerns only this policy)
            error_id = uuid.uuid4().hex[:12]
            _log.error("policy_not_restored", policy=policy, error_id=error_id, exc_info=error)


def _made_for(served: ServedPolicy) -> str:
    return served.run if is_on_cluster(served.engine) else ""


class RunServing:
    """Serves the policy of one run; see `runs.ports.Serving`."""

    def __init__(self, pool: EnginePool, run: str, project: str, engine: EngineSettings, notify: Notify) -> None:
        self._pool = pool
        self._run = run
        self._project = project
        self._engine = engine
        self._notify = notify
        self._policy = ""
        self._engines: EngineSet | None = None

    async def serve(self, policy: PublishedPolicy, overrides: Mapping[str, str], notify: Notify) -> None:
        """Serves a policy version under the policy's name.

        Raises:
            RunFailed: if the limit of engines is reached, its name is in use outside the project, or it cannot be started
                with these weights.
        """
        self._policy = policy.policy
        served = ServedPolicy(
            project=self._project, policy=policy, overrides=overrides, engine=self._engine, run=self._run
        )
        self._engines = await self._pool.place(served, self._run, notify)
        await self._engines.serve(served, notify)
        self._pool.keep()

    async def swap(self, policy: PublishedPolicy) -> SwapStats:
        """Replaces the weights by another version of the policy.

        Raises:
            RunFailed: if nothing is served, or no engine can be started with these weights.
        """
        if self._engines is None:
            raise RunFailed("No policy is served.")
        metrics = await self._engines.swap(policy)
        self._pool.keep()
        return metrics

    async def sampled_tokens(self) -> int:
        """Returns the number of tokens sampled by the policy's engines."""
        return 0 if self._engines is None else await self._engines.sampled_tokens()

    def release(self) -> None:
        """Marks the run as ended."""
        self._pool.release(self._policy, self._run)
