"""The queues that are measured, the settings that are tried for each, and in what they differ from the store."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.store.peers import lightning
from benchmarks.store.peers.load import Load, Settings

HOME = Path(__file__).parents[2] / ".peers" / "queues"
PYTHON = HOME / "bin" / "python"
OURS = "fulmen_"
BATCH, SINGLE = "64 jobs per request", "one job per request"
LOADS = {BATCH: {"producers": 8, "per_request": 64}, SINGLE: {"producers": 64, "per_request": 1}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One queue. `package` has its version in `python`; `unfinished` is SQL, true while a job is not acknowledged."""

    title: str
    module: str
    package: str
    tries: Mapping[str, Sequence[Settings]]
    differs: str
    unfinished: str | None
    python: Path = PYTHON
    durable: bool = True

    def command(self, action: str, address: str) -> list[str]:
        """Returns the command of one process."""
        if self.module.endswith(".mjs"):
            return ["node", str(Path(__file__).with_name("queues") / self.module), action, address]
        return [str(self.python), "-m", "benchmarks.store.peers.child", self.module, action, address]


def load(name: str, seconds: float) -> Load:
    """Returns one of the loads."""
    return Load(**LOADS[name], seconds=seconds)


def _both(*tries: Settings) -> dict[str, Sequence[Settings]]:
    return dict.fromkeys(LOADS, tries)


PEERS = (
    Peer(
        title="Fulmen's store",
        module=OURS,
        package="fulmen-store",
        python=Path(sys.executable),
        unfinished="select exists (select from item)",
        tries={
            BATCH: ({"runners": 4, "streams": 0}, {"runners": 4, "streams": 8}),
            SINGLE: ({"runners": 4, "streams": 64}, {"runners": 4, "streams": 0}),
        },
        differs="a service of its own between agents and PostgreSQL: priorities, retries, leases, results and rewards per attempt",
    ),
    Peer(
        title="pgmq (SQL, no extension)",
        module="pgmq_",
        package="pgmq",
        unfinished="select exists (select from pgmq.q_bench)",
        tries=_both(
            {"readers": 2, "batch": 100, "pool": 20},
            {"readers": 4, "batch": 100, "pool": 20},
            {"readers": 4, "batch": 500, "pool": 60},
            {"readers": 4, "batch": 100, "pool": 20, "processes": 2},
        ),
        differs="messages, not jobs: no priorities, no limit of attempts, no result; a message is deleted when it is done",
    ),
    Peer(
        title="Graphile Worker",
        module="graphile_worker.mjs",
        package="graphile-worker",
        unfinished="select exists (select from graphile_worker._private_jobs)",
        tries=_both(
            {"concurrency": 24, "local_queue": 500, "complete_delay_ms": 0, "pool": 25},
            {"concurrency": 100, "local_queue": 500, "complete_delay_ms": 10, "pool": 20},
            {"concurrency": 100, "local_queue": 500, "complete_delay_ms": 250, "pool": 60},
        ),
        differs="Node.js; acknowledges in batches after the delay, until then a crash runs jobs again; a job is deleted when it is done",
    ),
    Peer(
        title="PgQueuer",
        module="pgqueuer_",
        package="pgqueuer",
        unfinished="select exists (select from pgqueuer)",
        tries=_both(
            {"batch": 10, "pool": 10},
            {"batch": 100, "pool": 20},
            {"batch": 500, "pool": 60},
            {"batch": 100, "pool": 20, "processes": 2},
        ),
        differs="acknowledges in batches, at the latest after 0.1 s, until then a crash runs jobs again; keeps a log of each job",
    ),
    Peer(
        title="Oban for Python",
        module="oban_",
        package="oban",
        unfinished="select exists (select from oban_jobs where state <> 'completed')",
        tries=_both(
            {"concurrency": 50, "pool": 20},
            {"concurrency": 200, "pool": 60},
            {"concurrency": 100, "pool": 20, "processes": 2},
        ),
        differs="the free edition, whose inserts and acknowledgements are one statement a job; bulk ones are in its paid edition",
    ),
    Peer(
        title="Chancy",
        module="chancy_",
        package="chancy",
        unfinished="select exists (select from chancy_jobs where state <> 'succeeded')",
        tries=_both(
            {"concurrency": 100, "outgoing_s": 1, "pool": 10},
            {"concurrency": 500, "outgoing_s": 0.1, "pool": 60},
            {"concurrency": 200, "outgoing_s": 0.1, "pool": 20, "processes": 2},
        ),
        differs="acknowledges at intervals (1 s by default), until then a crash runs jobs again",
    ),
    Peer(
        title="Procrastinate",
        module="procrastinate_",
        package="procrastinate",
        unfinished="select exists (select from procrastinate_jobs where status in ('todo', 'doing'))",
        tries=_both(
            {"concurrency": 10, "pool": 12},
            {"concurrency": 10, "pool": 12, "processes": 2},
            {"concurrency": 10, "pool": 12, "processes": 4},
        ),
        differs="claims one job a statement; a trigger writes an event for each change of a job",
    ),
    Peer(
        title="Agent Lightning's store",
        module="agent_lightning_",
        package="agentlightning",
        python=lightning.HOME / "bin" / "python",
        unfinished=None,
        tries=_both({"runners": 8, "limit": 1}, {"runners": 8, "limit": 64}),
        differs="not durable: everything is in its server's memory; no priorities; workers poll",
        durable=False,
    ),
)
