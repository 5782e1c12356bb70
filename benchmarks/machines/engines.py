"""What a new version costs where a policy's engines are on other machines, behind slow lines.

Each engine is in a network namespace of its own behind a line of 100 Mbit/s and 20 ms, and so is the deployment: store, proxy
and algorithm service, with an engine of the run's own. A run of a Llama of random weights trains one supervised step of
AdamW after the other, in float32, and publishes each as a difference of bfloat16. Its engines are embedded ones behind real
weight agents, which fetch from each other as a tree. Bytes are those of the namespaces' interfaces, all protocols and all
other traffic of the machine included (where the kernel has no `netem`, a process of ours delays the packets); times are those of the agents' logs, from the first order of a version to the last
engine that has it. Everything shares one machine's processors, so times that are computing are upper bounds.

    python -m benchmarks.machines.engines
    python -m benchmarks.machines.engines --short

Needs Linux with network namespaces and `tc`. Writes `benchmarks/results/machines_engines.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.exchange.lines import LINES, Lines, LinesUnavailable, enter, shown
from benchmarks.outcome import Claim, claim, show, write
from tests.support.algorithm.joined_engines import (
    Agent,
    Publishing,
    elsewhere,
    open_world,
    started_publishing,
    weight_agent,
)
from tests.support.algorithm.training import BUILDER
from tests.support.end_to_end import World

MODULE = "benchmarks.machines.engines"
ROOT = Path(__file__).resolve().parents[2]
LINE = LINES["100mbit-20ms"]
RUN = "machines"
CALLERS = 4
SETTLE_S = 2.0
STALE_LIMIT_S = 120.0
LIMIT = aiohttp.ClientTimeout(total=300)
TINY = b"hidden=16, layers=1, heads=2, mlp=16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What one version took.

    Attributes:
        fetched_s: From the first order until all agents had fetched it, in seconds.
        current_s: Until all engines had it.
        engine_bytes: What each engine's machine received meanwhile, in bytes.
        service_bytes: What the service's machine sent.
        file_bytes: Size of its files.
        load: Of the machine, over the last minute: processes that compute or want to.
    """

    fetched_s: float
    current_s: float
    engine_bytes: list[int]
    service_bytes: int
    file_bytes: int
    load: float


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Calls through the proxy.

    Attributes:
        statuses: How many answers had each status.
        broken: Calls without an answer.
        versions: How many answers had tokens of each version.
    """

    statuses: dict[int, int] = field(default_factory=dict)
    broken: int = 0
    versions: dict[int, int] = field(default_factory=dict)

    @property
    def failed(self) -> int:
        """How many calls failed."""
        return self.broken + sum(count for status, count in self.statuses.items() if status != 200)


class Fleet:
    """A run, and the machines of its engines."""

    def __init__(self, run: Publishing, lines: Lines, folder: Path, stack: AsyncExitStack, service: int) -> None:
        self.run, self._lines, self._folder, self._stack, self._service = run, lines, folder, stack, service
        self.agents: list[Agent] = []

    async def join(self) -> float:
        """Has another engine join; returns the seconds from its agent's start until it served the right weights."""
        agent = await self.enter()
        await self.serving(agent)
        return time.monotonic() - agent.started_s

    async def enter(self) -> Agent:
        """Starts the agent of another engine."""
        number, world = len(self.agents), self.run.world
        settings = elsewhere(world, service=self._lines.address(self._service), own=self._lines.address(number))
        within = self._lines.within(number)
        agent: Agent = await self._stack.enter_async_context(
            weight_agent(world, self.run.run, self._folder / f"gpu-{number}", within=within, **settings)
        )
        self.agents.append(agent)
        return agent

    async def serving(self, agent: Agent) -> None:
        """Waits until an engine serves the newest version, and has its weights by its own account."""
        await agent.until_loaded(self.run.version)
        count = len(self.agents) + 1
        await self.run.until(lambda found: found.ready_engine_count >= count, "the proxy calls it")
        own = await self.weights(agent)
        # What the service compared with the version's own checksum.
        wanted = agent.events("weights_loaded")[-1]["sha256"]
        if own != {"version": self.run.version, "sha256": wanted}:
            raise AssertionError(f"an engine serves something else: {own}")

    async def weights(self, agent: Agent) -> dict[str, Any]:
        """Asks an engine for its version and checksum."""
        return await self._admin(agent, "get")

    async def load(self, agent: Agent, folder: Path, version: int) -> None:
        """Gives an engine other weights behind everybody's back."""
        await self._admin(agent, "post", json={"path": str(folder), "version": version})

    async def _admin(self, agent: Agent, method: str, **more: Any) -> dict[str, Any]:
        number = self.agents.index(agent)
        token = self.run.world.stack.spec("algorithm").environment["FULMEN_ALGORITHM_ENGINE_TOKEN"]
        url = f"http://{self._lines.address(number)}:{agent.port}/admin/weights"
        async with (
            aiohttp.ClientSession(timeout=LIMIT, headers={"Authorization": f"Bearer {token}"}) as client,
            client.request(method, url, **more) as answer,
        ):
            answer.raise_for_status()
            return {str(name): value for name, value in (await answer.json()).items()}

    async def publish(self) -> Version:
        """Publishes a version, and waits until all engines have it."""
        await asyncio.sleep(SETTLE_S)
        before = self._counters()
        version = await self.run.published()
        loaded = [await agent.until_loaded(version) for agent in self.agents]
        after = self._counters()
        name = f"resources/policy.{self.run.policy}/versions/{version}"
        ordered = [
            _at(each)
            for agent in self.agents
            for each in agent.events("weights_ordered")
            if each["policy_version"] == name
        ]
        fetched = [
            _at(each) for agent in self.agents for each in agent.events("weights_fetched") if each["version"] == version
        ]
        moved = [late - early for early, late in zip(before, after, strict=True)]
        return Version(
            fetched_s=max(fetched) - min(ordered),
            current_s=max(map(_at, loaded)) - min(ordered),
            engine_bytes=moved[:-1],
            service_bytes=moved[-1],
            file_bytes=max(each["fetched_bytes"] for each in loaded),
            load=os.getloadavg()[0],
        )

    def _counters(self) -> list[int]:
        """Returns the bytes that each engine's machine has received, and those that the service's has sent."""
        received = [self._count(number, "rx") for number in range(len(self.agents))]
        return [*received, self._count(self._service, "tx")]

    def _count(self, place: int, direction: str) -> int:
        words = [*self._lines.within(place), "ip", "-s", "-j", "link", "show", "dev", self._lines.interface]
        return int(json.loads(shown(*words))[0]["stats64"][direction]["bytes"])

    def full_folder(self) -> Path:
        """Returns a folder with complete weights that are older than all versions of the measurements."""
        runs = self.run.world.state_dir / "algorithm/runs/default" / RUN
        return next(path.parent for path in sorted(runs.rglob("model.safetensors")))


def _at(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["timestamp"]).timestamp()


async def call(client: aiohttp.ClientSession, world: World, traffic: Traffic) -> list[int]:
    """Calls the policy through the proxy; returns the versions of the answer's tokens."""
    url = f"{world.stack.targets['llm_proxy_http']}/v1/chat/completions"
    body = {"model": RUN, "messages": [{"role": "user", "content": "12+34="}], "max_tokens": 8}
    try:
        headers = {"Authorization": f"Bearer {world.stack.client_token}"}
        async with client.post(url, json=body, headers=headers) as answer:
            said = await answer.json(content_type=None)
            traffic.statuses[answer.status] = traffic.statuses.get(answer.status, 0) + 1
    except (aiohttp.ClientError, TimeoutError):
        traffic.broken += 1
        return []
    versions = [int(each["version"]) for each in said.get("weight_versions", [])]
    for version in versions:
        traffic.versions[version] = traffic.versions.get(version, 0) + 1
    return versions


@asynccontextmanager
async def traffic_on(world: World) -> AsyncIterator[Traffic]:
    """Calls the policy without a break until the block ends."""
    traffic = Traffic()

    async def calls(client: aiohttp.ClientSession) -> None:
        while True:
            await call(client, world, traffic)

    async with aiohttp.ClientSession(timeout=LIMIT) as client:
        tasks = [asyncio.create_task(calls(client)) for _ in range(CALLERS)]
        try:
            yield traffic
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def stale(fleet: Fleet) -> dict[str, Any]:
    """Gives an engine an old version behind everybody's back, and calls until it was found out, and a while longer."""
    world, victim = fleet.run.world, fleet.agents[-1]
    orders = len(victim.events("weights_ordered"))
    await fleet.load(victim, fleet.full_folder(), 1)
    traffic, old, calls_made = Traffic(), 0, 0
    until_s = time.monotonic() + STALE_LIMIT_S
    async with aiohttp.ClientSession(timeout=LIMIT) as client:
        # It is out at its first old answer, and told to load the newest version when the service has asked the proxy.
        while not (old and len(victim.events("weights_ordered")) > orders) and time.monotonic() < until_s:
            old += 1 in await call(client, world, traffic)
            calls_made += 1
        noticed = len(victim.events("weights_ordered")) > orders
        later = [await call(client, world, traffic) for _ in range(4 * len(fleet.agents))]
    again = sum(1 in versions for versions in later)
    return {"noticed": noticed, "calls": calls_made, "old_answers": old, "later": again, "failed": traffic.failed}


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures everything; runs on the service's machine."""
    count = arguments.engines
    lines = Lines(LINE, count + 1)
    size = f"hidden={arguments.hidden}, layers={arguments.layers}, heads=8, mlp={arguments.mlp}".encode()
    hosts = [lines.address(number) for number in range(count)]
    with tempfile.TemporaryDirectory(prefix="fulmen-machines-", dir="/tmp") as place:
        folder = Path(place)
        async with (
            open_world(folder / "s", hosts, FULMEN_ALGORITHM_ENGINE_FAN_OUT=str(arguments.fan_out)) as world,
            AsyncExitStack() as stack,
        ):
            run = await started_publishing(
                world,
                ROOT,
                RUN,
                folder,
                builder=BUILDER.replace(TINY, size),
                learning_rate=arguments.learning_rate,
                weights={"kind": "delta", "full_every": 1000},
            )
            fleet = Fleet(run, lines, folder, stack, count)
            say("an engine joins alone")
            first_s = await fleet.join()
            alone = [await fleet.publish() for _ in range(arguments.versions + 1)][1:]
            say(f"{count - 2} more join at the same time")
            before = fleet._counters()[-1]
            joining = [await fleet.enter() for _ in range(count - 2)]
            for agent in joining:
                await fleet.serving(agent)
                say(f"{agent.folder.name} serves")
            joined_bytes = fleet._counters()[-1] - before
            say("one more joins")
            last_s = await fleet.join()
            say("versions without calls")
            together = [await fleet.publish() for _ in range(arguments.versions)]
            say("versions with calls")
            async with traffic_on(world) as traffic:
                under_load = [await fleet.publish() for _ in range(arguments.versions)]
            say("a stale engine")
            found = await stale(fleet)
            # It had nothing when it joined.
            full_bytes = fleet.agents[-1].events("weights_loaded")[0]["fetched_bytes"]
    return {
        "arguments": vars(arguments),
        "full_bytes": full_bytes,
        "alone": [_shown(each) for each in alone],
        "together": [_shown(each) for each in together],
        "under_load": [_shown(each) for each in under_load],
        "joined_alone_s": first_s,
        "joined_last_s": last_s,
        "service_bytes_of_joining_at_once": joined_bytes,
        "calls": {
            "statuses": traffic.statuses,
            "broken": traffic.broken,
            "failed": traffic.failed,
            "versions": traffic.versions,
        },
        "stale": found,
    }


def _shown(version: Version) -> dict[str, Any]:
    return {name: getattr(version, name) for name in Version.__slots__}


def claims_of(raw: dict[str, Any]) -> list[Claim]:
    """Compares with the goals."""

    def median(phase: str, name: str) -> float:
        return statistics.median(each[name] for each in raw[phase])

    share = statistics.median(max(each["engine_bytes"]) for each in raw["together"]) / raw["full_bytes"]
    files = median("together", "file_bytes")
    sent = statistics.median(each["service_bytes"] / each["file_bytes"] for each in raw["together"])
    times = median("together", "current_s") / median("alone", "current_s")
    fetches = median("together", "fetched_s") / median("alone", "fetched_s")
    caught = raw["stale"]["old_answers"] if raw["stale"]["noticed"] else float("inf")
    fan_out = raw["arguments"]["fan_out"]
    return [
        claim("files of a version, of all weights", files / raw["full_bytes"], "share", goal=0.015, better="lower"),
        claim(
            "what the busiest engine's line received for a version, of all weights",
            share,
            "share",
            goal=0.015,
            better="lower",
        ),
        claim(
            "what the service's line sent for a version, in files of a version",
            sent,
            "files",
            goal=fan_out,
            better="lower",
        ),
        claim("until all engines have a version, against one engine alone", times, "times", goal=1.3, better="lower"),
        claim("until all agents have fetched it, against one agent alone", fetches, "times", goal=1.3, better="lower"),
        claim("calls that failed while versions rolled", raw["calls"]["failed"], "calls", goal=0, better="lower"),
        claim("one joins and serves the right weights", raw["joined_last_s"], "s", goal=30, better="lower"),
        claim("answers of a stale engine until it is out", caught, "answers", goal=1, better="lower"),
        claim("answers of a stale engine afterwards", raw["stale"]["later"], "answers", goal=0, better="lower"),
    ]


def say(what: str) -> None:
    """Says how far it is."""
    sys.stderr.write(f"engines: {what}\n")
    sys.stderr.flush()


def outside(arguments: Sequence[str], count: int) -> dict[str, Any]:
    """Makes the machines, and measures on that of the service."""
    enter(MODULE, arguments)
    lines = Lines(LINE, count + 1)
    with lines, tempfile.TemporaryDirectory() as folder:
        lines.shape()
        result = Path(folder) / "result.json"
        words = [*lines.within(count), sys.executable, "-m", MODULE, *arguments, "--inside", str(result)]
        with (Path(folder) / "log").open("w+b") as log:
            done = subprocess.run(words, check=False, stdout=log, cwd=ROOT)
            if done.returncode:
                log.seek(0)
                sys.stderr.write(log.read()[-20_000:].decode(errors="replace"))
                raise SystemExit(done.returncode)
        found: dict[str, Any] = json.loads(result.read_text())
        return found


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog=MODULE, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=8, help="machines with an engine, at least 3")
    parser.add_argument("--versions", type=int, default=5, help="versions of each measurement")
    parser.add_argument("--fan-out", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--mlp", type=int, default=1408)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument(
        "--short", action="store_true", help="three engines, a small model and two versions; writes nothing"
    )
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.short:
        arguments.engines, arguments.versions, arguments.hidden, arguments.layers, arguments.mlp = 3, 2, 128, 2, 256
    if arguments.inside:
        result, arguments.inside = arguments.inside, None
        result.write_text(json.dumps(asyncio.run(measure(arguments))))
        return
    try:
        raw = outside(sys.argv[1:], arguments.engines)
    except LinesUnavailable as error:
        raise SystemExit(f"{MODULE}: {error}") from error
    if arguments.short:
        show(raw, claims_of(raw))
        return
    write("machines_engines", method=__doc__ or "", raw=raw, claims=claims_of(raw))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
