"""A simulation of a deployment: agents that think, call models and end; services that have so much CPU; engines; a trainer.

Discrete events over stations of servers with first-come queues, and engines that share their speed among the calls that are in
them (`benchmarks/scale/engines.py`). What a rollout costs each service in CPU is measured (the load test of this folder); what an engine
does is measured with one engine (`benchmarks/machines/curve.py`), and a training step is assumed. It answers what bounds a
deployment, how busy everything is, and how long slots stay empty.

Not modelled: networks, memory, failures, PostgreSQL's disk, and that CPUs slow each other down. The services are as quick at their
hundredth core as at their first, which holds for processes that share nothing, not for one PostgreSQL.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.scale.engines import Engines, EngineSpeed, Seat
from benchmarks.scale.simulation import Simulation

# docs/capacity.md: a renewal is one stream message every five seconds.
RENEWAL_S: Final = 41e-6 / 5
WARM_UP: Final = 0.2
"""Share of the simulated time that is left out: the beginning is not how it goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """CPU seconds of one rollout with one model call, by service, and of one open session a second."""

    store_s: float
    postgres_s: float
    proxy_s: float
    runner_s: float
    session_s: float = RENEWAL_S

    @classmethod
    def measured(cls, raw: dict[str, Any]) -> Costs:
        """Reads them out of the load test's figures."""
        cores, rate = raw["cores"], raw["rollouts_per_s"]
        return cls(
            store_s=max(0.0, cores["store"] - raw["runners"] * RENEWAL_S) / rate,
            postgres_s=cores["postgres"] / rate,
            proxy_s=cores["proxy"] / rate,
            runner_s=cores["fleets"] / rate,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What runs, and what agents do.

    Attributes:
        runners: runner sessions.
        slots: attempts at once of each.
        think_s: mean seconds of an attempt without waiting; exponential.
        calls: model calls of an attempt.
        engines: how many serve the policy; 0: calls take no time.
        engine: what each does.
        store_replicas: processes of the store, one core each.
        postgres_cores: of PostgreSQL.
        proxies: processes of the proxy, one core each.
        cores: of a single machine that runs all of it, runners included; 0: every service has its own.
        batch: rollouts of a training step; 0: no training.
        step_s: seconds of a training step.
        ahead_steps: steps by which rollouts may run ahead of training.
    """

    runners: int
    slots: int
    think_s: float
    calls: int
    engines: int = 0
    engine: EngineSpeed = field(default_factory=EngineSpeed)
    store_replicas: int = 2
    postgres_cores: int = 8
    proxies: int = 1
    cores: int = 0
    batch: int = 0
    step_s: float = 0.0
    ahead_steps: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a deployment does: times in seconds, shares of what there is."""

    rollouts_per_s: float
    busy: dict[str, float]
    bound_by: str
    empty_p99_s: float


class _Station:
    """So many servers, and a queue."""

    def __init__(self, simulation: Simulation, servers: int) -> None:
        self._simulation = simulation
        self._servers = servers
        self._free = servers
        self._waiting: deque[tuple[float, Callable[[], None]]] = deque()
        self.busy_s = 0.0

    def serve(self, seconds: float, then: Callable[[], None]) -> None:
        """Serves for so long, when a server is free, and goes on with `then`."""
        if self._free:
            self._begin(seconds, then)
        else:
            self._waiting.append((seconds, then))

    def share(self, since_s: float, until_s: float) -> float:
        """Returns how busy the servers were."""
        return self.busy_s / (self._servers * (until_s - since_s))

    def _begin(self, seconds: float, then: Callable[[], None]) -> None:
        self._free -= 1
        if self._simulation.counts:
            self.busy_s += seconds
        self._simulation.after(seconds, lambda: self._end(then))

    def _end(self, then: Callable[[], None]) -> None:
        self._free += 1
        if self._waiting:
            self._begin(*self._waiting.popleft())
        then()


def predicted(deployment: Deployment, costs: Costs, *, seconds: float = 300.0, seed: int = 0) -> Prediction:
    """Simulates a deployment for so many seconds of its own time."""
    world = _World(deployment, costs, seed)
    world.start()
    world.simulation.run(seconds * WARM_UP)
    world.simulation.counts = True
    world.simulation.run(seconds)
    since_s = seconds * WARM_UP
    busy = {name: station.share(since_s, seconds) for name, station in world.stations.items()}
    if deployment.engines:
        busy |= world.engines.busy(seconds - since_s)
    if deployment.batch:
        busy["trainer"] = world.trained_s / (seconds - since_s)
    empty = sorted(world.empty_s) or [0.0]
    empty_p99_s = empty[int(0.99 * (len(empty) - 1))]
    busiest = max(busy, key=lambda name: busy[name])
    waits_for_steps = deployment.batch and empty_p99_s > deployment.step_s / 10
    return Prediction(
        rollouts_per_s=world.ended / (seconds - since_s),
        busy=busy,
        bound_by=busiest if busy[busiest] > 0.9 else "staleness" if waits_for_steps else "agents",
        empty_p99_s=empty_p99_s,
    )


class _World:
    """A deployment in motion."""

    def __init__(self, deployment: Deployment, costs: Costs, seed: int) -> None:
        self._deployment, self._costs = deployment, costs
        self._rng = random.Random(seed)
        self.simulation = Simulation()
        sessions = deployment.runners * costs.session_s
        if deployment.cores:
            machine = _Station(self.simulation, deployment.cores)
            self.stations = {"machine": machine}
            self._store = self._postgres = self._proxy = self._runner = machine
        else:
            self._store = _Station(self.simulation, deployment.store_replicas)
            self._postgres = _Station(self.simulation, deployment.postgres_cores)
            self._proxy = _Station(self.simulation, deployment.proxies)
            self._runner = _Station(self.simulation, 10**9)  # a fleet's own machines
            self.stations = {"store": self._store, "postgres": self._postgres, "proxy": self._proxy}
        # What sessions cost is there all the time: it makes everything else at the store slower.
        spare = max(0.02, 1 - sessions / (deployment.cores or deployment.store_replicas))
        self._slower = 1 / spare
        self.engines = Engines(self.simulation, deployment.engine, deployment.engines)
        self.ended, self.trained_s = 0, 0.0
        self.empty_s: list[float] = []
        self._started = self._ready = self._steps = 0
        self._training = False
        self._idle: deque[float] = deque()

    def start(self) -> None:
        """Lets every slot look for work."""
        for _ in range(self._deployment.runners * self._deployment.slots):
            self.simulation.after(self._rng.uniform(0, 1.0), self._look)

    def _look(self) -> None:
        self._idle.append(self.simulation.now_s)
        self._dispatch()

    def _dispatch(self) -> None:
        given = self._deployment
        while self._idle:
            if given.batch and self._started >= given.batch * (self._steps + 1 + given.ahead_steps):
                return
            since_s = self._idle.popleft()
            self._started += 1
            half = self._costs.store_s / 2 * self._slower
            self._store.serve(half, lambda since_s=since_s: self._claimed(since_s))  # type: ignore[misc]

    def _claimed(self, since_s: float) -> None:
        def begun() -> None:
            if self.simulation.counts:
                self.empty_s.append(self.simulation.now_s - since_s)
            self._runner.serve(self._costs.runner_s, lambda: self._think(None, self._deployment.calls))

        self._postgres.serve(self._costs.postgres_s / 2, begun)

    def _think(self, seat: Seat | None, calls: int) -> None:
        parts = self._deployment.calls + 1
        seconds = self._deployment.think_s / parts
        then = (lambda: self._call(seat, calls)) if calls else (lambda: self._report(seat))
        self.simulation.after(self._rng.expovariate(1 / seconds) if seconds else 0.0, then)

    def _call(self, seat: Seat | None, calls: int) -> None:
        def seated(seat: Seat | None) -> None:
            if seat is None:
                self._think(None, calls - 1)
            else:
                self.engines.serve(seat, self._rng.expovariate(1.0), lambda: self._think(seat, calls - 1))

        def called() -> None:
            if seat is None and self._deployment.engines:
                self.engines.seat(seated)
            else:
                seated(seat)

        self._proxy.serve(self._costs.proxy_s, called)

    def _report(self, seat: Seat | None) -> None:
        if seat is not None:
            self.engines.leave(seat)
        half = self._costs.store_s / 2 * self._slower
        self._store.serve(half, lambda: self._postgres.serve(self._costs.postgres_s / 2, self._end))

    def _end(self) -> None:
        self.ended += self.simulation.counts
        self._ready += 1
        self._look()
        self._train()

    def _train(self) -> None:
        given = self._deployment
        if not given.batch or self._training or self._ready < given.batch:
            return
        self._training, self._ready = True, self._ready - given.batch
        if self.simulation.counts:
            self.trained_s += given.step_s

        def trained() -> None:
            self.engines.swap()
            self._training = False
            self._steps += 1
            self._dispatch()
            self._train()

        self.simulation.after(given.step_s, trained)
