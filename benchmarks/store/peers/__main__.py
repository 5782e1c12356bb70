"""Benchmark of the store beside its peers: job queues on PostgreSQL, and Agent Lightning's store.

Method: one PostgreSQL (fsync and synchronous_commit on, the same settings) for all, and a new database for every turn. A job
is enqueued and committed, claimed, worked on (nothing is done), acknowledged and committed; a turn ends when the database has no
unfinished job, and the jobs that were done are counted. At most 1,000 jobs wait in each process. First each queue tries its settings,
once per load; the fastest ones are measured. Then the queues take turns, forwards and backwards (ABBA); figures are medians. CPU is
that of the processes that enqueue and work, of a server before the database, and of PostgreSQL with all its processes. Everything
shares one machine: `others_cores` is what other work took of it. Ratios and CPU per job hold on a busy machine, rates do not.
Run `python -m benchmarks.store.peers [--short]`; writes benchmarks/results/store_peers.json and the tables of docs/capacity.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import outcome
from benchmarks.store.peers import lightning, report
from benchmarks.store.peers.catalogue import HOME, LOADS, OURS, PEERS, Peer, load
from benchmarks.store.peers.load import Settings
from benchmarks.store.peers.turn import PeerError, Place, Turn, take
from benchmarks.store.stand import running_postgres

TOOL = Path(__file__).parents[3] / "tools" / "peers_env.sh"
PAGE = Path(__file__).parents[3] / "docs" / "capacity.md"
ROUNDS = 4
TURN_S = 3.0
TRY_S = 1.5
SHORT_S = 1.0


def version(peer: Peer) -> str | None:
    """Returns the version of a queue's package; none if its environment does not have it."""
    if peer.module == OURS:
        return metadata.version(peer.package)
    if peer.module.endswith(".mjs"):
        script = f"process.stdout.write(require('{HOME}/node_modules/{peer.package}/package.json').version)"
        command = ["node", "-e", script]
    else:
        command = [str(peer.python), "-c", f"from importlib import metadata; print(metadata.version('{peer.package}'))"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None


async def chosen(place: Place, peer: Peer, name: str) -> tuple[Settings, list[tuple[Settings, float | None]]]:
    """Tries the settings of a queue, and returns the fastest and the rate of each; none for one that did not do its turn."""
    tried: list[tuple[Settings, float | None]] = []
    for settings in peer.tries[name]:
        try:
            rate: float | None = (await take(place, peer, load(name, TRY_S), settings)).rate
        except (PeerError, TimeoutError) as error:
            sys.stderr.write(f"{peer.title}: {error!r}\n")
            rate = None
        sys.stderr.write(f"{name}, {peer.title} with {settings}: {rate and round(rate)} jobs/s\n")
        tried.append((settings, rate))
    return max(tried, key=lambda one: one[1] or 0.0)[0], tried


async def measure(place: Place, peers: Sequence[Peer], *, short: bool) -> dict[str, dict[str, Any]]:
    """Lets the queues take turns; returns by title and load what was measured."""
    for peer in peers:
        await place.install(peer)
    raw: dict[str, dict[str, Any]] = {
        peer.title: {"durable": peer.durable, "differs": peer.differs, "loads": {}} for peer in peers
    }
    for name in LOADS:
        picked = {peer.title: (peer.tries[name][0], []) if short else await chosen(place, peer, name) for peer in peers}
        turns: dict[str, list[Turn]] = {peer.title: [] for peer in peers}
        for number in range(1 if short else ROUNDS):
            for peer in peers if number % 2 == 0 else reversed(peers):
                turn = await take(place, peer, load(name, SHORT_S if short else TURN_S), picked[peer.title][0])
                sys.stderr.write(
                    f"{name}, {peer.title}: {turn.rate:,.0f} jobs/s, {turn.others_cores:.1f} cores taken by others\n"
                )
                turns[peer.title].append(turn)
        for peer in peers:
            settings, tried = picked[peer.title]
            raw[peer.title]["loads"][name] = report.summary(turns[peer.title], settings, tried)
    return raw


def claims(raw: Mapping[str, Mapping[str, Any]], peers: Sequence[Peer]) -> list[outcome.Claim]:
    """Compares the store with the best of the durable peers."""
    ours = next(peer for peer in peers if peer.module == OURS)
    found = []
    for name in LOADS:
        own = raw[ours.title]["loads"][name]
        theirs = [raw[peer.title]["loads"][name] for peer in peers if peer.durable and peer is not ours]
        for what, figure in (("jobs/s", report.rate), ("jobs per CPU-second", report.per_cpu_second)):
            ratio = figure(own) / max(map(figure, theirs))
            found.append(
                outcome.claim(f"{name}: {what} by those of the best durable peer", ratio, "x", goal=1, better="higher")
            )
    return found


async def run(folder: Path, *, short: bool) -> None:
    """Measures every queue that is installed, and writes the results."""
    versions = {peer.title: version(peer) for peer in PEERS}
    peers = [peer for peer in PEERS if versions[peer.title]]
    for peer in PEERS:
        if peer not in peers:
            sys.stderr.write(f"{peer.title} is not measured: its environment does not have it\n")
    async with running_postgres(folder) as dsn:
        raw = await measure(Place(folder, dsn), peers, short=short)
    for peer in peers:
        raw[peer.title] = {"version": versions[peer.title]} | raw[peer.title]
    found = claims(raw, peers)
    if short:
        outcome.show(raw, found)
    else:
        outcome.write("store_peers", method=__doc__ or "", raw=raw, claims=found)
        report.write_page(PAGE, raw)
    sys.stdout.write(report.page(raw) + "\n")


def main() -> None:
    """Installs the peers the first time, runs the benchmark and writes its results."""
    parser = argparse.ArgumentParser(description="Measures the store beside its peers.")
    parser.add_argument(
        "--short", action="store_true", default=bool(os.environ.get("SHORT")), help="one turn each, nothing is written"
    )
    arguments = parser.parse_args()
    subprocess.run([TOOL], check=True)
    lightning.installed_peer()
    with tempfile.TemporaryDirectory(prefix="fulmen-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        asyncio.run(run(folder, short=arguments.short))


if __name__ == "__main__":
    main()
