"""Supervises one engine of a policy: keeps it alive with the right weights, and registered at the proxy.

Invariant: the proxy's routes lead to an engine that listens, under the version that it has; after a crash the engine is
restarted with the newest version, and its new port is registered. It keeps running after the run that started it.
"""

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import structlog

from fulmen.errors import FulmenError, QuotaExceeded, RouteExists
from fulmen_algorithm.clients.patience import AWAY, Patience
from fulmen_algorithm.engines.engine import Engine, EngineFailed, EngineOptions, Starter, SwapGate
from fulmen_algorithm.engines.proxy_admin import AttachGate, ProxyAdmin, ProxyGate, RoutingGate
from fulmen_algorithm.policy.engine_settings import EngineSettings
from fulmen_algorithm.policy.served import ServedPolicy
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import Notify, PublishedPolicy, SwapStats

_log = structlog.get_logger()

HEALTH_INTERVAL_S = 5.0
FAILED_CHECKS = 3
FIRST_RESTART_WAIT_S = 0.5
LONGEST_RESTART_WAIT_S = 10.0
START_ATTEMPTS = 3
LONGEST_HOLD_S = 600.0
LONGEST_LEAVE_S = 60.0
REFUSED_OR_AWAY: tuple[type[Exception], ...] = (FulmenError, *AWAY)


class EngineSupervisor:
    """Serves one policy, alone or with others; see `replicas`.

    Attributes:
        served: The served policy, also while the engine is being restarted.
        ready: Whether the engine is registered at the proxy and takes calls.
        last_used: Time of the last sampled tokens or loaded weights, by `time.monotonic`.
        retired: Whether it was retired; it must not serve again.
        handed_over: Whether another service serves the policy: the engine keeps its weights until it ends or its slot is
            needed, but is never registered again.
    """

    def __init__(
        self,
        options: EngineOptions,
        proxy: ProxyAdmin,
        *,
        outage_limit_s: float,
        starter: Starter,
    ) -> None:
        self._options = options
        self._starter = starter
        self._proxy = proxy
        self._outage_limit_s = outage_limit_s
        self.served: ServedPolicy | None = None
        self._notify: Notify = log_only
        self._engine: Engine | None = None
        self._changing = asyncio.Lock()
        self._loaded: PublishedPolicy | None = None
        self._started_with: EngineSettings | None = None
        self._started = asyncio.Event()
        self._restarting = False
        self.ready = False
        self.retired = False
        self.handed_over = False
        self.last_used = time.monotonic()
        self._tokens_before = 0
        self._tokens_of_engine = 0

    @property
    def backend(self) -> str:
        """Name of its backend at the proxy."""
        return self._proxy.backend

    async def serve(self, served: ServedPolicy, notify: Notify) -> None:
        """Serves a policy version under the policy's name; a running engine takes the weights in place.

        Raises:
            RunFailed: if the engine cannot be started with these weights.
        """
        async with self._changing:
            self.served, self._notify, self.handed_over = served, notify, False
            self.last_used = time.monotonic()
            if self._engine is not None and self._started_with == served.engine:
                # Calls in flight, from before a restart of the service, continue: the version is promoted only when
                # the engine has it, since their next tokens are still of the old one.
                await self._register()
                if self._loaded == served.policy:
                    await self._put_routes()
                    return
                gate = RoutingGate(self._proxy, served, self._patience(), engine_model=self._engine.address.model)
                if await self._give_weights(self._engine, served.policy, gate) is not None:
                    return
            await self._bring_up(anew=self._engine is not None)

    def leave(self) -> None:
        """Marks the run as ended; it gets no more notices about the engine."""
        self._notify = log_only
        self.last_used = time.monotonic()

    def hand_over(self) -> None:
        """Leaves the policy's backend and routes at the proxy to another service; calls in flight end."""
        self.handed_over = True
        self.leave()

    async def swap(self, policy: PublishedPolicy) -> SwapStats | None:
        """Replaces the weights in place.

        Returns:
            The cost; None if the engine did not take them, or is being restarted. It then gets no calls until it has been
            restarted with them, by `bring_back`.
        """
        assert self.served is not None
        self.served = replace(self.served, policy=policy)
        if self._restarting:
            return None
        async with self._changing:
            self.last_used = time.monotonic()
            gate = ProxyGate(self._proxy, policy, self._patience())
            return await self._give_weights(self._engine, policy, gate)

    async def bring_back(self) -> None:
        """Restarts an engine that did not take its weights, and waits for it.

        Raises:
            RunFailed: if it cannot be started with these weights.
        """
        async with self._changing:
            await self._bring_up()

    def bring_back_later(self) -> None:
        """Has an engine that did not start, or did not take its weights, restarted while others serve."""
        self._started.set()

    async def _give_weights(self, engine: Engine | None, policy: PublishedPolicy, gate: SwapGate) -> SwapStats | None:
        """Gives an engine weights; one that does not take them is stopped, and its calls are held."""
        self._loaded = None  # after a cancellation the engine's weights are unknown
        try:
            if engine is None:
                raise EngineFailed("The engine is being restarted.")
            metrics = await engine.swap(policy, gate)
        except EngineFailed as error:
            version = policy.version
            self._notify("warning", f"{error} The engine of {self._proxy.backend} is restarted with version {version}.")
            await self._hold_calls()
            await self._stop_engine()
            return None
        self._loaded = policy
        return metrics

    async def sampled_tokens(self) -> int:
        """Returns the number of tokens sampled by this engine and its predecessors."""
        engine = self._engine
        if engine is not None:
            try:
                tokens = await engine.sampled_tokens()
            except EngineFailed:
                _log.info("engine_stats_missing", pid=engine.pid)
            else:
                if tokens > self._tokens_of_engine:
                    self.last_used = time.monotonic()
                self._tokens_of_engine = tokens
        return self._tokens_before + self._tokens_of_engine

    async def run(self) -> None:
        """Watches the engine until it is retired or cancelled, then stops it.

        Failures are logged and retried after a wait; they end neither other engines nor the service.
        """
        failed, wait_s = False, FIRST_RESTART_WAIT_S
        try:
            while not self.retired:
                try:
                    if failed:
                        await self._recover()
                    else:
                        await self._started.wait()
                        await self._watch()
                    failed, wait_s = False, FIRST_RESTART_WAIT_S
                except Exception as error:  # noqa: BLE001  (any error concerns only this engine)
                    self._log_failure(error, first=not failed)
                    failed = True
                    await asyncio.sleep(wait_s)
                    wait_s = min(wait_s * 2, LONGEST_RESTART_WAIT_S)
        finally:
            await self._stop_engine()

    async def retire(self) -> None:
        """Ends the engine for good; its routes must lead elsewhere by now."""
        self.retired = True
        async with self._changing:
            self.served = None
            try:
                await self._stop_engine()
            finally:
                self._started.set()  # wake the supervisor's loop, which then ends

    async def leave_routes(self) -> None:
        """Takes the engine out of the policy's routes, and waits for the calls that it has; others must serve the policy.

        Does not wait while the proxy is unavailable.
        """
        if self.served is None or self.handed_over:
            return
        try:
            await self._proxy.leave_routes(self.served)
            await ProxyGate(self._proxy, self.served.policy, self._patience()).idle(LONGEST_LEAVE_S)
        except REFUSED_OR_AWAY as error:
            _log.warning("engine_left_in_routes", backend=self._proxy.backend, reason=type(error).__name__)

    async def unregister(self) -> None:
        """Removes the engine's backend from the proxy; does not wait while the proxy is unavailable."""
        try:
            await self._proxy.unregister()
        except REFUSED_OR_AWAY as error:
            _log.warning("backend_left_behind", backend=self._proxy.backend, reason=type(error).__name__)

    def _log_failure(self, error: Exception, *, first: bool) -> None:
        """Logs why the engine could not be supervised or replaced; its run is notified at its start."""
        error_id = uuid.uuid4().hex[:12]
        served = self.served
        policy = served.policy.policy if served is not None else ""
        _log.error("engine_supervisor_failed", policy=policy, error_id=error_id, exc_info=error)
        if first and served is not None:
            text = f"The engine could not be restarted, which will be retried. Quote id {error_id}."
            self._notify("warning", text)

    async def _recover(self) -> None:
        """Recovers from a failure: starts the engine and registers it at the proxy."""
        if self._engine is None:
            await self._replace(None, "It did not start")
            return
        async with self._changing:
            if self.served is not None and not self.handed_over:
                await self._bring_up()

    async def _watch(self) -> None:
        """Waits until the present engine has exited, stops answering or proves to be stale, then replaces it."""
        engine = self._engine
        failed, reason = 0, "It did not start" if engine is None else "It ended"
        while engine is not None and engine is self._engine:
            try:
                async with asyncio.timeout(HEALTH_INTERVAL_S):
                    status = await engine.ended()
                _log.warning("engine_ended", status=status, pid=engine.pid)
                break
            except TimeoutError:
                failed = 0 if await engine.healthy() else failed + 1
                await self.sampled_tokens()  # updates last_used
                if failed >= FAILED_CHECKS:
                    _log.warning("engine_deaf", pid=engine.pid)
                    reason = "It stopped answering"
                    break
                if version := await self._stale_version():
                    _log.warning("engine_stale", pid=engine.pid, version=version)
                    reason = f"It answered a call with version {version}, which is older than expected"
                    break
        await self._replace(engine, reason)

    async def _stale_version(self) -> int:
        """Returns the older version that an answer of the engine proved to the proxy; 0 if there was none."""
        if self.handed_over:
            return 0
        try:
            return await self._proxy.stale_version()
        except REFUSED_OR_AWAY:
            return 0  # asked again

    async def _replace(self, dead: Engine | None, reason: str) -> None:
        wait_s = FIRST_RESTART_WAIT_S
        while True:
            async with self._changing:
                if self._engine is not dead or self.served is None:
                    return  # it has been replaced meanwhile
                if self.handed_over:
                    await self._stop_engine()
                    self.served = None
                    return
                self._notify("warning", f"The engine of {self._proxy.backend} is restarted. {reason}.")
                try:
                    await self._bring_up(anew=True)
                    return
                except RunFailed:
                    dead = None
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, LONGEST_RESTART_WAIT_S)

    async def _bring_up(self, *, anew: bool = False) -> None:
        """Starts the engine if it does not run, gives it the newest version, and registers it.

        It has the newest version when this returns, also if another one was published meanwhile.

        Args:
            anew: Whether a running engine is stopped first.

        Raises:
            RunFailed: if it cannot be started with these weights, or its name is in use outside the project.
        """
        assert self.served is not None
        self._restarting = True
        try:
            if anew:
                await self._hold_calls()
                await self._stop_engine()
            for attempt in range(START_ATTEMPTS):
                try:
                    registered: PublishedPolicy | None = None
                    while registered != self.served.policy:
                        registered = await self._load(self.served)
                        await self._register_and_route()
                    return
                except EngineFailed as error:
                    model = str(self.served.policy.path)
                    _log.warning("engine_start_failed", attempt=attempt + 1, model=model, reason=str(error))
                    await self._stop_engine()
                    if attempt + 1 == START_ATTEMPTS:
                        raise RunFailed(str(error)) from error
        finally:
            self._restarting = False

    async def _load(self, served: ServedPolicy) -> PublishedPolicy:
        """Starts the engine with a version, or gives it the version if it has another; returns the version.

        Raises:
            EngineFailed: if it does not start, or does not take it.
        """
        policy = served.policy
        gate = AttachGate(self._proxy, policy, self._patience())
        if self._engine is None:
            self._engine = await self._starter.start(
                self._options, policy, engine=served.engine, notify=self._notify, gate=gate
            )
            self._started_with = served.engine
            self._started.set()
            _log.info("engine_started", pid=self._engine.pid, version=policy.version)
        elif self._loaded != policy:
            self._loaded = None
            await self._engine.swap(policy, gate)
        self._loaded = policy
        return policy

    async def _hold_calls(self) -> None:
        """Holds calls in the proxy until the engine is registered again; does not wait while the proxy is unavailable.

        Other engines of the policy get its calls. Where there are none they wait: a large engine takes minutes to start,
        and every call that fails meanwhile costs a rollout an attempt.
        """
        self.ready = False
        try:
            await self._proxy.hold(LONGEST_HOLD_S)
        except REFUSED_OR_AWAY as error:
            _log.info("engine_calls_not_held", reason=type(error).__name__)

    async def _stop_engine(self) -> None:
        engine, self._engine = self._engine, None
        self.ready = False
        self._tokens_before += self._tokens_of_engine
        self._tokens_of_engine = 0
        self._started.clear()
        if engine is not None:
            await engine.stop()

    async def _register_and_route(self) -> None:
        assert self._loaded is not None
        # First the version, for routes that have led to this engine before: no call may find it under an older one.
        await AttachGate(self._proxy, self._loaded, self._patience()).promote()
        await self._register()
        await self._put_routes()

    async def _register(self) -> None:
        assert self._engine is not None
        address = self._engine.address
        with _names_refused():
            await self._patience().call(lambda: self._proxy.register(address))

    async def _put_routes(self) -> None:
        assert self.served is not None
        assert self._engine is not None
        assert self._loaded is not None
        served, model, version = self.served, self._engine.address.model, self._loaded.version
        with _names_refused():
            await self._patience().call(lambda: self._proxy.put_routes(served, version=version, engine_model=model))
        self.ready = True

    def _patience(self) -> Patience:
        return Patience(service="LLM proxy", notify=self._notify, limit_s=self._outage_limit_s)


@contextmanager
def _names_refused() -> Iterator[None]:
    try:
        yield
    except RouteExists as error:
        raise RunFailed(f"{error.message} Choose another name for the policy.") from error
    except QuotaExceeded as error:
        raise RunFailed(error.message) from error


def log_only(severity: str, message: str) -> None:
    """Logs the notices of an engine whose run has ended."""
    _log.warning("engine_notice", severity=severity, text=message)
