"""Background role: one engine per served policy, up to the limit of engines.

Invariant: an engine whose run is active is never retired. The engine of an ended run keeps serving until its slot is
needed; the least recently used one is then retired. The served versions are stored on disk and restored when the
service restarts, without their runs.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import structlog

from fulmen.rpc.channel import FulmenChannel
from fulmen_algorithm.clients.patience import Patience
from fulmen_algorithm.engines.engine import EngineOptions
from fulmen_algorithm.engines.proxy_admin import ProxyAdmin, backend_id
from fulmen_algorithm.engines.starter import EngineStarter
from fulmen_algorithm.engines.supervisor import REFUSED_OR_AWAY, EngineSupervisor
from fulmen_algorithm.policy.engine_settings import EngineSettings
from fulmen_algorithm.policy.served import ServedPolicies, ServedPolicy
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy, SwapStats

_log = structlog.get_logger()


@dataclass(slots=True, kw_only=True)
class _Place:
    """The slot of one engine.

    Attributes:
        number: From 0; determines the port, unless ports are chosen freely.
        project: Project of its policy.
        run: The active run that uses it; empty if none.
    """

    number: int
    project: str
    supervisor: EngineSupervisor
    run: str = ""


class EnginePool:
    """The engines of the service."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        starter: EngineStarter,
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
            starter: Starts engines.
            proxy: Channel to the LLM proxy.
            backend_prefix: Prefix of the engines' backend ids at the proxy.
            file: Storage of the served versions.
            max_engines: Number of slots.
            outage_limit_s: Maximum wait for the proxy, in seconds.
            still_serves: Returns whether no other service has run a policy since this one served it.
        """
        self._options = options
        self._starter = starter
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

    async def place(self, published: PublishedPolicy, run: str, project: str, notify: Notify) -> EngineSupervisor:
        """Returns the engine of a policy, in a new slot if necessary, and assigns it to the run.

        Raises:
            RunFailed: if active runs use all slots, or a model name is in use outside the project.
        """
        policy = published.policy
        async with self._placing:
            await self._require_names(published, project, notify)
            # The engine of another project, whose route was deleted.
            if policy in self._places and self._places[policy].project != project:
                await self._retire(policy)
            if policy not in self._places:
                if len(self._places) >= self._max_engines:
                    await self._make_room()
                self._places[policy] = self._new_place(policy, project)
            place = self._places[policy]
            place.run = run
            return place.supervisor

    async def is_taken(self, policy: str, project: str) -> bool:
        """Returns whether the name of a policy is in use outside its project; False if the proxy cannot be asked."""
        try:
            return await self._admin(policy, project).is_taken(policy)
        except REFUSED_OR_AWAY:
            return False  # asked again before the policy is served

    def release(self, policy: str, run: str) -> None:
        """Marks a run as ended; its engine keeps serving until its slot is needed."""
        place = self._places.get(policy)
        if place is not None and place.run == run:
            place.run = ""
            place.supervisor.leave()

    def hand_over(self, policy: str) -> None:
        """Leaves a policy to another service, which runs it now; its engine here ends when its slot is needed."""
        place = self._places.get(policy)
        if place is not None and not place.supervisor.handed_over:
            _log.warning("policy_handed_over", policy=policy)
            place.run = ""
            place.supervisor.hand_over()
            self.keep()

    def keep(self) -> None:
        """Stores the served versions."""
        kept = [place.supervisor for place in self._places.values() if not place.supervisor.handed_over]
        self._file.save([each.served for each in kept if each.served is not None])

    async def _require_names(self, published: PublishedPolicy, project: str, notify: Notify) -> None:
        proxy = self._admin(published.policy, project)
        patience = Patience(service="LLM proxy", notify=notify, limit_s=self._outage_limit_s)
        for name in published.model_names:
            if await patience.call(partial(proxy.is_taken, name)):
                raise RunFailed(
                    f"The model name {name!r} is in use outside {project}. Choose another name for the policy."
                )

    def _admin(self, policy: str, project: str) -> ProxyAdmin:
        return ProxyAdmin(self._proxy, backend_id=backend_id(self._backend_prefix, policy), project=project)

    def _new_place(self, policy: str, project: str) -> _Place:
        taken = {place.number for place in self._places.values()}
        number = next(n for n in range(self._max_engines) if n not in taken)
        port = self._options.port + number if self._options.port else 0
        supervisor = EngineSupervisor(
            replace(self._options, port=port),
            self._admin(policy, project),
            outage_limit_s=self._outage_limit_s,
            starter=self._starter,
        )
        self._new.put_nowait(supervisor)
        return _Place(number=number, project=project, supervisor=supervisor)

    async def _make_room(self) -> None:
        idle = {policy: place for policy, place in self._places.items() if not place.run}
        if not idle:
            raise RunFailed(f"All {self._max_engines} engines serve policies of active runs (setting max_engines).")
        await self._retire(min(idle, key=lambda p: idle[p].supervisor.last_used))

    async def _retire(self, policy: str) -> None:
        _log.info("engine_makes_room", policy=policy)
        supervisor = self._places[policy].supervisor
        try:
            await supervisor.retire()
        finally:
            # Shielded from the caller's cancellation: a retired engine has no supervisor.
            if supervisor.retired:
                del self._places[policy]
                self.keep()

    async def _restore(self, served: ServedPolicy) -> None:
        policy = served.policy.policy
        if not await self._still_serves(policy):
            _log.info("policy_served_elsewhere", policy=policy)
            return
        async with self._placing:
            if policy in self._places or len(self._places) >= self._max_engines:
                return  # a run was quicker
            self._places[policy] = self._new_place(policy, served.project)
            supervisor = self._places[policy].supervisor
        try:
            await supervisor.restore(served)
        except RunFailed as error:
            _log.warning("policy_not_served_again", policy=policy, version=served.policy.version, reason=error.message)
        except Exception as error:  # noqa: BLE001  (any error concerns only this policy)
            error_id = uuid.uuid4().hex[:12]
            _log.error("policy_not_restored", policy=policy, error_id=error_id, exc_info=error)


class RunServing:
    """Serves the policy of one run; see `runs.ports.Serving`."""

    def __init__(self, pool: EnginePool, run: str, project: str, engine: EngineSettings, notify: Notify) -> None:
        self._pool = pool
        self._run = run
        self._project = project
        self._engine = engine
        self._notify = notify
        self._policy = ""
        self._supervisor: EngineSupervisor | None = None

    async def serve(self, policy: PublishedPolicy, overrides: Mapping[str, str], notify: Notify) -> None:
        """Serves a policy version under the policy's name.

        Raises:
            RunFailed: if the limit of engines is reached, its name is in use outside the project, or it cannot be started
                with these weights.
        """
        self._policy = policy.policy
        self._supervisor = await self._pool.place(policy, self._run, self._project, notify)
        served = ServedPolicy(project=self._project, policy=policy, overrides=overrides, engine=self._engine)
        await self._supervisor.serve(served, notify)
        self._pool.keep()

    async def swap(self, policy: PublishedPolicy) -> SwapStats:
        """Replaces the weights by another version of the policy.

        Raises:
            RunFailed: if nothing is served, or no engine can be started with these weights.
        """
        if self._supervisor is None:
            raise RunFailed("No policy is served.")
        metrics = await self._supervisor.swap(policy)
        self._pool.keep()
        return metrics

    async def sampled_tokens(self) -> int:
        """Returns the number of tokens sampled by the policy's engines."""
        return 0 if self._supervisor is None else await self._supervisor.sampled_tokens()

    def release(self) -> None:
        """Marks the run as ended."""
        self._pool.release(self._policy, self._run)
