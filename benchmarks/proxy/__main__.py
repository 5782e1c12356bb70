"""Benchmark of the LLM proxy: what a model call costs in it, beside its peers, and what faults do to calls.

Method: a canned backend answers small (581 bytes) or RL-sized (1,024 prompt ids, 256 token ids with log-probabilities:
37 kB) or streams 66 events, all at once or over 0.7 s; a client keeps a fixed number of calls in flight and checks every
answer; each is a process of its own. Fulmen runs with capture, attribution, limits, metrics and delivery to a store;
its CPU includes the delivery. CPU is user and system time of all processes of a proxy, per call. The peers run in the
same run over the same backend and client, one after the other; a slow one gets fewer calls. On a busy machine CPU per
call and ratios hold, times do not.
Run `python -m benchmarks.proxy [--short] [--only CASE ...] [--peers KEY,...|none] [--real-store]`; writes
benchmarks/results/proxy.json and proxy.png.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import uvloop

from benchmarks import outcome
from benchmarks.proxy import cases, faults, fulmen, peers, picture, processes, report, stores
from benchmarks.proxy.cases import CASES, PEER_SOFT_S, THOUSAND, Case, Target
from benchmarks.proxy.processes import Client

PARTS = ("soak", "swap", "kill", "import")
_WARM = (
    Case(name="warm", concurrency=16, calls=400, size="rl", asks_ids=True, peer_limit_s=60.0),
    Case(name="warm streams", concurrency=16, calls=200, pace_ms=0, peer_limit_s=60.0),
)
_WARM_SCALE_OF = 400
_SHORT_SCALE = 0.25
_SHORT_SOAK = 4000
# CPU, which other work on the machine does not change; and what is resident now: the peak that getrusage knows is
# inherited from the parent on Linux.
IMPORT = """
import resource, sys, time
started = time.process_time()
import fulmen_llm_proxy.app
spent_s = time.process_time() - started
if sys.platform == "linux":
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * resource.getpagesize()
else:
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(spent_s, resident / 1e6)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be measured."""

    short: bool
    only: tuple[str, ...]
    peers: tuple[peers.Peer, ...]
    real_store: bool

    def has(self, name: str) -> bool:
        """True if a case or part is to be measured; a name means all that begin with it."""
        return not self.only or any(name.startswith(one) for one in self.only)

    def cases(self) -> list[Case]:
        """Returns the cases; those that take longest come last."""
        return [case for case in (*CASES, THOUSAND) if self.has(case.name)]

    @property
    def scale(self) -> float:
        """Share of a case's calls."""
        return _SHORT_SCALE if self.short else 1.0

    @property
    def soak_calls(self) -> int:
        """Calls of the long run."""
        return _SHORT_SOAK if self.short else faults.SOAK_CALLS

    @property
    def rounds(self) -> int:
        """How often each case is measured."""
        return 1 if self.short else 3


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


class Run:
    """One run: what is measured goes into `raw`."""

    def __init__(self, plan: Plan, client: Client) -> None:
        self._plan = plan
        self._client = client
        self.raw: dict[str, Any] = {"cases": {}, "peers": {}}

    async def measure(self, case: Case, target: Target, *, soft_s: float = 0.0) -> None:
        """Measures a case once."""
        scale = 1.0 if case is THOUSAND else self._plan.scale
        run = await cases.measure(self._client, case, target, scale=scale, soft_s=soft_s)
        self.raw["cases"].setdefault(case.name, {}).setdefault(target.name, []).append(run)
        cpu, wrong = run["cpu_us_per_call"], run["errors"] or ""
        _say(f"{target.name:32} {case.name:34} {cpu or '':>9} us  p50 {run['p50_ms']:>8} ms {wrong}")

    async def warm(self, target: Target, calls: int) -> None:
        """Makes calls that are not measured."""
        for case in _WARM:
            await cases.measure(self._client, case, target, scale=calls / _WARM_SCALE_OF, soft_s=PEER_SOFT_S)

    async def own(self, direct: Target, target: Target) -> None:
        """Measures Fulmen and, beside it, the backend without any proxy."""
        await self.warm(target, _WARM_SCALE_OF)
        for number in range(self._plan.rounds):
            for case in self._plan.cases():
                if case is THOUSAND and number:
                    continue
                await self.measure(case, target)
                if case.captured and not case.injected and not (case is THOUSAND and self._plan.short):
                    await self.measure(case, direct)

    async def peer(self, peer: peers.Peer, backend: str) -> None:
        """Measures a peer; one that does not run is named with its reason."""
        try:
            async with peers.running(peer, backend) as target:
                await self.warm(target, peer.warm_calls)
                for number in range(peer.rounds):
                    for case in self._plan.cases():
                        if (
                            case.captured
                            and (target.injects or not case.injected)
                            and not (case is THOUSAND and number)
                        ):
                            await self.measure(case, target, soft_s=PEER_SOFT_S)
            self.raw["peers"][peer.name] = "measured"
        except (RuntimeError, TimeoutError, OSError, subprocess.CalledProcessError) as error:
            # The last line alone: what is before names paths of this machine.
            self.raw["peers"][peer.name] = f"did not run: {(str(error).strip() or repr(error)).splitlines()[-1]}"
            _say(f"{peer.name} did not run: {error!r}")

    async def faults(self, stand: fulmen.Fulmen, other_backend: str) -> None:
        """Measures what calls notice of changes and of deaths."""
        plan, raw = self._plan, self.raw
        if plan.has("swap"):
            raw["swap"] = await faults.swap(self._client, stand, other_backend)
        if plan.has("kill"):
            raw["kill"] = await faults.kill(self._client, stand)


def measure_import() -> dict[str, float]:
    """Measures what it costs to import the service, in a fresh process; the best of five."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True) for _ in range(5)
    ]
    figures = [tuple(map(float, run.stdout.split())) for run in runs]
    return {"cpu_s": min(figure[0] for figure in figures), "mb": min(figure[1] for figure in figures)}


async def measure(plan: Plan) -> dict[str, Any]:
    """Runs everything that is planned; returns the raw figures."""
    async with (
        processes.module("backend") as (backend_process, port),
        processes.module("backend") as (_, other_port),
        processes.client() as client,
    ):
        backend = f"127.0.0.1:{port}"

        async def anybody(_: Case, __: int) -> list[cases.Identity]:
            return [(fulmen.PATH, "none")]

        direct = Target(name=report.DIRECT, addresses=[backend], pids=lambda: [backend_process.pid], identities=anybody)
        run = Run(plan, client)
        async with stores.real() if plan.real_store else stores.acknowledging() as store:
            # A process of its own: one that has just served a thousand streams gives memory back meanwhile.
            if plan.has("soak"):
                async with fulmen.running(store, backend) as fresh:
                    run.raw["soak"] = await faults.soak(client, fresh, calls=plan.soak_calls)
            async with fulmen.running(store, backend) as stand:
                await run.own(direct, stand.target())
                await run.faults(stand, f"127.0.0.1:{other_port}")
                run.raw["captured_calls"] = stand.captured
        for peer in plan.peers if plan.cases() else ():
            await run.peer(peer, backend)
        return run.raw


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Reads the command line.

    Raises:
        SystemExit: if a peer is unknown.
    """
    keys = {peer.key: peer for peer in peers.PEERS}
    chosen = arguments.peers if arguments.peers is not None else "none" if arguments.short else ",".join(keys)
    names = [] if chosen == "none" else chosen.split(",")
    if unknown := [name for name in names if name not in keys]:
        raise SystemExit(f"unknown peers: {', '.join(unknown)}; there are: {', '.join(keys)}")
    return Plan(
        short=arguments.short,
        only=tuple(arguments.only or ()),
        peers=tuple(keys[name] for name in names),
        real_store=arguments.real_store,
    )


def main() -> None:
    """Runs the benchmark and writes its results."""
    parser = argparse.ArgumentParser(description="Measures the LLM proxy.")
    parser.add_argument(
        "--short", action="store_true", default=bool(os.environ.get("SHORT")), help="90 seconds, without peers"
    )
    names = ", ".join([*(case.name for case in (*CASES, THOUSAND)), *PARTS])
    parser.add_argument("--only", nargs="+", help=f"only what begins so, nothing is written: {names}")
    parser.add_argument("--peers", help=f"these or none: {','.join(peer.key for peer in peers.PEERS)}")
    parser.add_argument("--real-store", action="store_true", help="deliver to a real store; nothing is written")
    plan = plan_of(parser.parse_args())
    imported = {"import": measure_import()} if plan.has("import") else {}
    raw = uvloop.run(measure(plan)) | imported
    claims = report.claims_of(raw)
    _say("\n" + report.table(raw) + "\n")
    if plan.only or plan.real_store:
        parts = {key: dict(value) for key, value in raw.items() if key in PARTS}
        parts.get("soak", {}).pop("memory_mb", None)
        outcome.show(parts, [])
    else:
        outcome.write("proxy", method=__doc__ or "", raw=raw, claims=claims, rounds=plan.rounds, short=plan.short)
        picture.draw(raw, outcome.FOLDER / "proxy.png")
    _say("\n" + report.verdicts(claims))


if __name__ == "__main__":
    main()
