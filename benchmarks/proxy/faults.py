"""What goes on under load: a long run, a swap of weights, the death of a replica."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp

from benchmarks.proxy import cases, fulmen
from benchmarks.proxy.cases import THOUSAND, Case, summary
from benchmarks.proxy.processes import Client, cpu_seconds, memory_mb
from fulmen_service_kit.security.tokens import TokenSigner

SOAK_CALLS = 100_000
_CALLS_PER_ATTEMPT = 50
_SAMPLES = 40
_SOAK = Case(name="soak", concurrency=16, calls=SOAK_CALLS, size="rl", injected=True)
_KILL = Case(name="kill", concurrency=64, calls=512, pace_ms=cases.PACE, ramp_s=0.7)
_SWAP_AFTER_RAMP_S = 0.5
"""The first thousand have begun by then, and none has ended."""
_KILL_AT_S = 1.5
_MIB = 1.048576


async def soak(client: Client, stand: fulmen.Fulmen, *, calls: int) -> dict[str, Any]:
    """Makes many captured calls of many attempts; memory is sampled on the way."""
    target = stand.target()
    identities = await stand.identities(_SOAK, calls // _CALLS_PER_ATTEMPT + _SOAK.concurrency)
    every = calls // _SAMPLES
    job = replace(
        _SOAK.job(target.addresses, identities, scale=calls / _SOAK.calls, soft_s=0),
        calls_per_identity=_CALLS_PER_ATTEMPT,
        progress_every=every,
        limit_s=600.0,
    )
    samples: list[tuple[int, float]] = []
    before = cpu_seconds(target.pids())
    outcome = await client.run(job, lambda done: samples.append((done, memory_mb(target.pids()))))
    await target.settle()
    memory = [mb for _, mb in samples]
    quarter = len(memory) // 4
    # The least of a quarter: what is held then is held for good, and not for captures on their way to the store.
    grown_mb = min(memory[-quarter:]) - min(memory[quarter : 2 * quarter])
    return summary(outcome, cpu_s=cpu_seconds(target.pids()) - before) | {
        "memory_mb": [(at, round(mb, 1)) for at, mb in samples],
        "growth_mib_per_10k": round(grown_mb / _MIB / (calls / 2) * 10_000, 3),
        "peak_mb": round(max(memory), 1),
        "attempts": len(identities),
    }


async def swap(client: Client, stand: fulmen.Fulmen, other_backend: str) -> dict[str, Any]:
    """Promotes a version and then sends everything to another backend, while 1,000 streams run.

    Twice as many streams as run at once: the second half begins after the swap.
    """
    target = stand.target()
    identities = await stand.identities(THOUSAND, THOUSAND.concurrency)
    job = THOUSAND.job(target.addresses, identities, scale=2, soft_s=0)
    await stand.register("two", f"http://{other_backend}/v1")
    before = cpu_seconds(target.pids())
    async with asyncio.TaskGroup() as group:
        load = group.create_task(client.run(job), name="load")
        await asyncio.sleep(cases.THOUSAND_RAMP_S + _SWAP_AFTER_RAMP_S)  # the load is another process
        await stand.promote(2)
        await stand.route("two", 3)
    outcome = load.result()
    await target.settle()
    async with aiohttp.ClientSession() as session, session.get(f"http://{other_backend}/") as answer:
        moved = (await answer.json())["calls"]
    await stand.route("one", 4)
    return summary(outcome, cpu_s=cpu_seconds(target.pids()) - before) | {"calls_after_swap": moved}


async def kill(client: Client, stand: fulmen.Fulmen) -> dict[str, Any]:
    """Kills one of two replicas while 64 streams run; the client makes broken calls again at the other."""
    first = stand.replicas[0]
    identities = await stand.identities(_KILL, _KILL.concurrency)
    async with fulmen.replica(stand.store, TokenSigner(stand.store.signing_key)) as second:
        await _follows(client, stand, second)
        job = _KILL.job([first.address, second.address], identities, scale=1, soft_s=0)
        async with asyncio.TaskGroup() as group:
            load = group.create_task(client.run(job), name="load")
            await asyncio.sleep(_KILL_AT_S)  # the load is another process
            second.process.kill()
        outcome = load.result()
    stand.made.clear()  # what the killed replica had captured is not this one's to flush
    return summary(outcome, cpu_s=0) | {"cpu_us_per_call": None, "in_flight_at_most": _KILL.concurrency // 2}


async def _follows(client: Client, stand: fulmen.Fulmen, second: fulmen.Replica) -> None:
    """Returns when a replica has the route."""
    warm = Case(name="warm", concurrency=1, calls=1, captured=False)
    identities = await stand.identities(warm, 1)
    async with asyncio.timeout(fulmen.START_LIMIT_S):
        while True:
            outcome = await client.run(warm.job([second.address], identities, scale=1, soft_s=0))
            if outcome.calls:
                return
            await asyncio.sleep(0.1)  # another process follows the store
