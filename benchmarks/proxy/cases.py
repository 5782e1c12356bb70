"""The loads, the same for every proxy, and how one of them is measured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.proxy import answers
from benchmarks.proxy.client import Job, Outcome
from benchmarks.proxy.processes import Client, cpu_seconds, memory_mb

THOUSAND_PACE_MS = 100.0
"""Ten tokens a second, as a busy model sends them: at 66 events in 0.7 s no two cores could even make them."""
THOUSAND_RAMP_S = 5.0
PEER_SOFT_S = 5.0
"""A slow peer gets no new calls after so long; its CPU per call is steady by then."""

Identity = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of load.

    Attributes:
        size: `small` or `rl`, of whole answers.
        pace_ms: from one event of a stream to the next; 0: all at once; None: no stream.
        asks_ids: the agent itself asks for token ids and log-probabilities, and gets them.
        captured: made with an attempt's key; else with a client's, and only passed. Only Fulmen tells them apart.
        injected: of use only to proxies that ask the backend for ids when the agent does not.
        peer_limit_s: how long it may take at most.
    """

    name: str
    concurrency: int
    calls: int
    size: str = "small"
    pace_ms: float | None = None
    asks_ids: bool = False
    captured: bool = True
    injected: bool = False
    ramp_s: float = 0.0
    peer_limit_s: float = 30.0

    def job(self, addresses: list[str], identities: list[Identity], *, scale: float, soft_s: float) -> Job:
        """Makes the client's job."""
        body = answers.request_body(size=self.size, pace_ms=self.pace_ms, asks_ids=self.asks_ids)
        return Job(
            addresses=addresses,
            identities=identities,
            body=body.decode(),
            concurrency=self.concurrency,
            calls=max(self.concurrency, int(self.calls * scale)),
            stream=self.pace_ms is not None,
            soft_s=soft_s,
            limit_s=self.peer_limit_s if soft_s else 120.0,
            ramp_s=self.ramp_s,
        )


PACE = answers.PACE_MS
CASES = (
    Case(name="small c1", concurrency=1, calls=1000),
    Case(name="small c16", concurrency=16, calls=4000),
    Case(name="small c64", concurrency=64, calls=4000),
    Case(name="RL c1", concurrency=1, calls=1000, size="rl", asks_ids=True),
    Case(name="RL c16", concurrency=16, calls=4000, size="rl", asks_ids=True),
    Case(name="RL c64", concurrency=64, calls=4000, size="rl", asks_ids=True),
    Case(name="RL c16, ids injected and stripped", concurrency=16, calls=4000, size="rl", injected=True),
    Case(name="burst streams c16", concurrency=16, calls=1000, pace_ms=0),
    Case(name="burst streams c64", concurrency=64, calls=1000, pace_ms=0),
    Case(name="burst streams c16, passed", concurrency=16, calls=1000, pace_ms=0, captured=False),
    Case(name="burst streams c64, passed", concurrency=64, calls=1000, pace_ms=0, captured=False),
    Case(name="paced streams c16", concurrency=16, calls=96, pace_ms=PACE, ramp_s=0.7),
    Case(name="paced streams c64", concurrency=64, calls=384, pace_ms=PACE, ramp_s=0.7),
    Case(name="paced streams c16, passed", concurrency=16, calls=96, pace_ms=PACE, captured=False, ramp_s=0.7),
    Case(name="paced streams c64, passed", concurrency=64, calls=384, pace_ms=PACE, captured=False, ramp_s=0.7),
)
THOUSAND = Case(
    name="1000 streams",
    concurrency=1000,
    calls=1000,
    pace_ms=THOUSAND_PACE_MS,
    ramp_s=THOUSAND_RAMP_S,
    peer_limit_s=120.0,
)


async def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A proxy that runs, or the backend itself.

    Attributes:
        identities: makes so many identities for a case.
        settle: returns when what the calls left behind is done, such as the delivery of captures.
        injects: it asks the backend for token ids on its own account.
    """

    name: str
    addresses: list[str]
    pids: Callable[[], list[int]]
    identities: Callable[[Case, int], Awaitable[list[Identity]]]
    settle: Callable[[], Awaitable[None]] = _nothing
    injects: bool = False


async def measure(
    client: Client, case: Case, target: Target, *, scale: float = 1.0, soft_s: float = 0.0
) -> dict[str, Any]:
    """Runs one case once; CPU is that of all the target's processes, delivery of captures included."""
    identities = await target.identities(case, case.concurrency)
    job = case.job(target.addresses, identities, scale=scale, soft_s=soft_s)
    before = cpu_seconds(target.pids())
    outcome = await client.run(job)
    await target.settle()
    pids = target.pids()
    return summary(outcome, cpu_s=cpu_seconds(pids) - before) | {"memory_mb": round(memory_mb(pids), 1)}


def summary(outcome: Outcome, *, cpu_s: float) -> dict[str, Any]:
    """Sums up one run."""
    calls = max(1, outcome.calls)
    document = asdict(outcome) | {
        "seconds": round(outcome.seconds, 3),
        "cpu_us_per_call": round(cpu_s / calls * 1e6, 1) if outcome.calls else None,
        "client_cpu_us_per_call": round(outcome.cpu_s / calls * 1e6, 1),
    }
    del document["cpu_s"]
    return document
