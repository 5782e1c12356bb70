"""Lists of a million rollouts: how long a page, a filter, an order, a search and facets take at the store.

A database of the server gets rollouts of a month that have ended, with attempts and usage, and some that wait: rewards of 0, 1
and between, four agents, three task types, 50 training runs, tasks of 300 to 900 bytes. A store serves it, and each query is
sent as a person at a console would: one after the other, over gRPC.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import asyncpg
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from benchmarks.store.stand import Bench, cpu_seconds, postgres_cpu_seconds, serving
from fulmen.store.v1 import rollout_pb2, rollout_selection_pb2, rollout_service_pb2, rollout_service_pb2_grpc
from fulmen.store.v1.rollout_service_pb2_grpc import RolloutServiceStub
from fulmen_store.database.migrations import migrate

__all__ = ["filled", "run"]

ROLLOUTS: Final = 1_000_000
SHORT_ROLLOUTS: Final = 50_000
WAITING: Final = 2_000
VARIANTS: Final = 2_000
RUNS: Final = 50
SPAN_S: Final = 30 * 86_400
CALLS: Final = 60
SHORT_CALLS: Final = 10
GOAL_MS: Final = 200.0
# What a console asks for: how long to look.
LIMIT_S: Final = 0.1
WORDS: Final = [
    "invoice",
    "order",
    "customer",
    "refund",
    "ticket",
    "delivery",
    "address",
    "payment",
    "parcel",
    "contract",
    "account",
    "meter",
]
AGENTS: Final = [f"resources/agent.{name}/versions/{n}" for name in ("orders", "sql") for n in (1, 2)]
TASK_TYPES: Final = ["short", "long", "tool"]
RUN: Final = "projects/default/trainingRuns/run-7"
# $1: how many; $2: seconds over which they were created; $3: how many of the newest wait.
FILL: Final = (
    """
    create unlogged table made as
    select
        (lpad(to_hex((extract(epoch from now() - ($1 - n) * $2 / $1 * interval '1 second') * 1000)::bigint), 12, '0')
            || '7' || substr(md5(n::text), 1, 3) || '8' || substr(md5(n::text), 4, 15))::uuid as id,
        now() - ($1 - n) * $2 / $1 * interval '1 second' as created_at,
        n, 1 + (hashint4(n::int) & 2147483647) % $4::int as variant, 1 + n * 50 / ($1 + 1) as run_id,
        n > $1 - $3 as waits, (hashint4(n::int + 7) & 2147483647) / 2147483647.0 as chance,
        (hashint4(n::int + 13) & 2147483647) / 2147483647.0 as luck
    from generate_series(1, $1::bigint) n where $2::float8 > 0 and $3::bigint > 0
    """,
    """
    insert into rollout (id, project_id, run_id, sort_priority, mode, group_id, task_type, agent, request, created_at)
    select m.id, 1, m.run_id, 0, 1, 'g' || m.n / 8, v.task_type, v.agent, v.request, m.created_at
    from made m join variant v on v.n = m.variant order by m.n
    """,
    """
    insert into rollout_end (
        rollout_id, project_id, run_id, group_size, state, failure_kind, reward, duration_s, failure_message, ended_at
    )
    select
        m.id, 1, m.run_id, 8, case when m.chance < 0.05 then 5 else 4 end, case when m.chance < 0.05 then 1 else 0 end,
        case when m.chance >= 0.05 then case when m.luck < 0.4 then 0 when m.luck < 0.7 then 1 else round(m.luck::numeric, 4) end end,
        1 + 60 * m.luck * m.luck, case when m.chance < 0.05 then 'ValueError: no answer' end, m.created_at + interval '1 minute'
    from made m where not m.waits order by m.n
    """,
    """
    insert into attempt (rollout_id, number, state, failure_kind, rollout_state, session, started_at, ended_at, report)
    select
        m.id, 1, case when m.chance < 0.05 then 3 else 2 end, case when m.chance < 0.05 then 1 else 0 end,
        case when m.chance < 0.05 then 5 else 4 end, v.session, m.created_at, m.created_at + interval '1 minute', v.report
    from made m join variant v on v.n = m.variant where not m.waits order by m.n
    """,
    """
    insert into item (id, project_id, run_id, sort_priority, group_size, max_attempts, retry_mask, backoff_ms, timeout_ms, run_at)
    select m.id, 1, m.run_id, 0, 1, 3, 24, 0, 1000, now() from made m where m.waits order by m.n
    """,
    """
    insert into usage_attempt
    select m.id, 1, 'm', 'b', 1, m.run_id, 4, 0, (1000 + 20000 * m.luck)::bigint, 0, (50 + 900 * m.luck)::bigint,
        (100 + 5000 * m.luck * m.chance)::bigint
    from made m where not m.waits order by m.n
    """,
    """
    insert into rollout_usage (rollout_id, project_id, run_id, prompt_token_count, completion_token_count, cost_micros)
    select rollout_id, project_id, run_id, prompt_token_count, completion_token_count, cost_micros from usage_attempt
    """,
    "drop table made",
)


def _variants(rng: random.Random, names: Mapping[str, int]) -> list[tuple[object, ...]]:
    """Returns requests of rollouts and the reports of their attempts."""
    made: list[tuple[object, ...]] = []
    for number in range(1, VARIANTS + 1):
        agent, task_type = rng.choice(AGENTS), rng.choice(TASK_TYPES)
        text = " ".join(rng.choices(WORDS, k=rng.randint(30, 90)))
        if number == 1:
            text += " chrysanthemum"
        rollout = rollout_pb2.Rollout(
            project="projects/default", agent=agent, task_type=task_type, mode=rollout_pb2.ROLLOUT_MODE_TRAIN,
            input=f'{{"question": "{text}"}}'.encode(), input_content_type="application/json",
            metadata={"customer": f"c{rng.randint(1, 200)}", "split": rng.choice("ab")},
            required_labels={"gpu": rng.choice(("none", "h100"))},
        )  # fmt: skip
        rollout.policy.max_attempts = 3
        answer = " ".join(rng.choices(WORDS, k=12)).encode()
        report = rollout_pb2.Rollout().attempts.add(output=answer, output_content_type="text/plain")
        made.append(
            (
                number, names[task_type], names[agent], rollout.SerializeToString(deterministic=True),
                report.SerializeToString(), "00000000-0000-4000-8000-000000000001",
            )
        )  # fmt: skip
    return made


async def filled(dsn: str, name: str, *, rollouts: int, seed: int = 1) -> str:
    """Makes a database of the server with so many rollouts; returns its URL."""
    server = await asyncpg.connect(dsn)
    await server.execute(f'create database "{name}"')
    await server.close()
    dsn = urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))
    await migrate(dsn)
    connection = await asyncpg.connect(dsn, command_timeout=1800)
    try:
        for number in range(1, RUNS + 1):
            await connection.execute(
                "insert into training_run (project_id, name) values (1, $1)",
                f"projects/default/trainingRuns/run-{number}",
            )
        names = {}
        for kind, text in [(1, each) for each in TASK_TYPES] + [(2, each) for each in AGENTS]:
            names[text] = await connection.fetchval(
                "insert into interned_name (project_id, kind, name) values (1, $1, $2) returning id", kind, text
            )
        await connection.execute(
            "create unlogged table variant (n int, task_type int, agent int, request bytea, report bytea, session uuid)"
        )
        await connection.copy_records_to_table("variant", records=_variants(random.Random(seed), names))
        await connection.execute("set synchronous_commit = off")
        await connection.execute(FILL[0], rollouts, float(SPAN_S), min(WAITING, rollouts // 2), VARIANTS)
        for statement in FILL[1:]:
            await connection.execute(statement)
        await connection.execute("vacuum analyze")
    finally:
        await connection.close()
    return dsn


def _queries() -> Mapping[str, Message]:
    """Returns what is asked, by what it is."""
    page = rollout_service_pb2.ListRolloutsRequest
    count = rollout_selection_pb2.CountRolloutsRequest
    shown = {"page_size": 100, "time_limit": Duration(nanos=int(LIMIT_S * 1e9))}
    facets = ["state", "failure_kind", "task_type", "agent", "training_run", "reward"]
    return {
        "newest": page(**shown),
        "of a run": page(training_run=RUN, **shown),
        "state = FAILED": page(filter="state = FAILED", **shown),
        "reward < 0.8 AND reward > 0.7": page(filter="reward < 0.8 AND reward > 0.7", **shown),
        "duration > 55s": page(filter="duration > 55s", **shown),
        "token_count, cost_micros": page(filter="token_count > 15000 AND cost_micros < 2000", **shown),
        "agent": page(filter=f'agent = "{AGENTS[0]}"', **shown),
        "metadata.customer (1 of 200)": page(filter="metadata.customer = c7", **shown),
        "required_labels": page(filter="required_labels.gpu = h100", **shown),
        "ended_attempt_count = 0": page(filter="ended_attempt_count = 0 AND state = SUCCEEDED", **shown),
        "input: a word of many": page(filter='input:"refund parcel"', **shown),
        "input: a word of 1 in 2000": page(filter="input:chrysanthemum", **shown),
        "input: a word of none": page(filter="input:zirconium", **shown),
        "output: a phrase": page(filter='output:"order refund"', **shown),
        "by reward": page(order_by="reward desc", **shown),
        "by reward, ascending": page(order_by="reward", **shown),
        "by duration": page(order_by="duration desc", **shown),
        "by tokens": page(order_by="token_count desc", **shown),
        "by cost": page(order_by="cost_micros desc", **shown),
        "by cost, of a run": page(order_by="cost_micros desc", training_run=RUN, **shown),
        "by duration, FAILED": page(order_by="duration desc", filter="state = FAILED", **shown),
        "by cost, of an agent, reward = 1": page(
            order_by="cost_micros desc", filter=f'agent = "{AGENTS[1]}" AND reward = 1', **shown
        ),
        "count and facets": count(facets=facets, time_limit=shown["time_limit"]),
        "count and facets, reward = 1": count(facets=facets, filter="reward = 1", time_limit=shown["time_limit"]),
        "count and facets of maps": count(facets=["metadata", "required_labels"], time_limit=shown["time_limit"]),
    }


async def run(bench: Bench) -> None:
    """Measures each query, page after page: the whole call, as it is at the client on the same machine."""
    rollouts, calls = (SHORT_ROLLOUTS, SHORT_CALLS) if bench.short else (ROLLOUTS, CALLS)
    started = time.perf_counter()
    dsn = await filled(bench.dsn, "lists", rollouts=rollouts)
    bench.raw["lists"] = {"rollouts": rollouts, "filled_s": round(time.perf_counter() - started, 1)}
    with TemporaryDirectory(prefix="fulmen-bench-") as folder:
        await measured_queries(bench, dsn, Path(folder), calls=calls)


async def measured_queries(bench: Bench, dsn: str, folder: Path, *, calls: int) -> None:
    """Serves a filled database, and measures each query against it."""
    async with serving(dsn, folder) as served:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(served.channels[0])
        slowest_ms = 0.0
        for name, request in _queries().items():
            used_s = _cpu_s(bench, served.pids)
            figures = await _timed(stub, request, calls)
            # Other work on the machine does not change it.
            figures["cpu_ms"] = round((_cpu_s(bench, served.pids) - used_s) / calls * 1000, 1)
            bench.raw["lists"][name] = figures
            slowest_ms = max(slowest_ms, figures["p95_ms"])
            print(f"  {name:36}", "  ".join(f"{key} {value:>8}" for key, value in figures.items()), flush=True)
    count = bench.raw["lists"]["rollouts"]
    bench.claim(f"slowest query of a list of {count:,} rollouts, p95", slowest_ms, "ms", GOAL_MS, "lower")


def _cpu_s(bench: Bench, store_pids: Sequence[int]) -> float:
    """Returns the CPU time of store and PostgreSQL."""
    return cpu_seconds(store_pids) + postgres_cpu_seconds(bench.postgres_folder)


async def _timed(stub: RolloutServiceStub, request: Any, calls: int) -> dict[str, float]:
    """Sends a request so many times, for one page after the other; returns times and what came back."""
    times_ms, found = [], 0
    for _ in range(calls):
        started = time.perf_counter()
        if isinstance(request, rollout_service_pb2.ListRolloutsRequest):
            answer = await stub.ListRollouts(request)
            found += len(answer.rollouts)
            request.page_token = answer.next_page_token
        else:
            found += (await stub.CountRollouts(request)).count
        times_ms.append((time.perf_counter() - started) * 1000)
    p50, p95 = (statistics.quantiles(times_ms, n=20)[place] for place in (9, 18))
    return {"p50_ms": round(p50, 1), "p95_ms": round(p95, 1), "mean_rows": round(found / calls)}
