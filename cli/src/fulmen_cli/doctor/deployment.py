"""Checks of a deployment. Read-only; every wait is short."""

from __future__ import annotations

import asyncio
import datetime
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.connection import claims_of
from fulmen.errors import FulmenError, PermissionDenied, TokenInvalid
from fulmen.kinds import CHECKED_KINDS, content_problems
from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, completion_service_pb2
from fulmen.llm_proxy.v1.backend_service_pb2_grpc import BackendServiceStub
from fulmen.rpc.channel import FulmenChannel
from fulmen.rpc.resource_contents import read_resources
from fulmen.rpc.services import Services
from fulmen.rpc.status import CLOCK_METADATA_KEY
from fulmen.store.v1 import (
    resource_pb2,
    resource_service_pb2,
    rollout_service_pb2,
    run_lease_service_pb2,
    runner_registry_service_pb2,
)
from fulmen_cli.connection import Connection
from fulmen_cli.doctor.finding import Finding
from fulmen_cli.output import enum_word
from fulmen_cli.rollout.backlog import pause_text

__all__ = ["clocks", "deployment", "engines", "token"]

LIMIT_S: Final = 5.0
CALL_LIMIT_S: Final = 60.0
PROBES: Final = 3
SLOW_S: Final = 0.25
PAGE_SIZE: Final = 1000
SOON: Final = datetime.timedelta(days=7)
UNOWNED_S: Final = 60
RUNS_SHOWN: Final = 10
SKEW_S: Final = 2.0
STORE: Final = "store"
STORE_READINESS: Final = "fulmen.store.v1"
ALL_PROJECTS: Final = "projects/*"
OK: Final = 200
SERVING: Final = health_pb2.HealthCheckResponse.SERVING


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The result of a health check: its latency and how far its clock is ahead of this one, or the problem."""

    status: int | None = None
    latency_s: float = 0.0
    problem: str = ""
    ahead_s: float | None = None


async def deployment(connection: Connection, *, model: str = "") -> list[Finding]:
    """Checks a deployment: the caller's token, each service, the queue, its runners, the backends.

    Args:
        connection: where it is.
        model: called for one token, if it is named.
    """
    targets = connection.targets()
    now = datetime.datetime.now(datetime.UTC)
    services = {"store": targets.store, "algorithm": targets.algorithm}
    services |= {
        f"proxy {number}" if number > 1 else "proxy": each for number, each in enumerate(connection.proxies(), 1)
    }
    bearer = connection.bearer()
    health = dict(
        zip(services, await asyncio.gather(*(_health(connection, each) for each in services.values())), strict=True)
    )
    findings = [token(bearer, now)]
    for name, answer in health.items():
        given = {"store": connection.store_target, "algorithm": connection.algorithm_target}
        meant = not connection.names_services or bool(given.get(name, connection.llm_proxy_target))
        findings.append(_service(name, services[name], answer, meant=meant))
    async with connection.open() as client:
        if health["store"].status is not None:
            ready = await _health(connection, targets.store, service=STORE_READINESS)
            ahead_s = {name: each.ahead_s for name, each in health.items() if each.ahead_s is not None}
            findings += [_database(ready), *await _queue(client), *await _runners(client), clocks(ahead_s)]
            findings += [*await _resources(client), *await _unowned_runs(client)]
        if health["algorithm"].status is not None:
            findings += await _engines(client)
        # Each proxy has breakers of its own.
        for name, answer in health.items():
            if name.startswith("proxy") and answer.status is not None:
                findings.append(await _backends(connection, services[name], name.replace("proxy", "backends")))
        if health["proxy"].status is not None:
            findings.append(await _call(client, model))
    return findings


def token(bearer: str | None, now: datetime.datetime) -> Finding:
    """Is there a token, and does it remain valid? The deployment checks its signature."""
    advice = "`fulmen token issue --role client` makes one; give it with --token or FULMEN_TOKEN."
    if bearer is None:
        return Finding(what="token", ok=None, text="none given; works only with services in dev mode", advice=advice)
    claims = claims_of(bearer)
    if claims is None:
        return Finding(what="token", ok=False, text="malformed token", advice=advice)
    left = datetime.datetime.fromtimestamp(claims["exp"], datetime.UTC) - now
    project = "all projects" if claims.get("prj") == ALL_PROJECTS else claims.get("prj", "no project")
    text = f"role {claims.get('role', 'unknown')}, {project}"
    if left <= datetime.timedelta():
        return Finding(what="token", ok=False, text=f"{text}, expired {-left.days} days ago", advice=advice)
    days = f"valid for {left.days} days"
    return Finding(
        what="token", ok=None if left < SOON else True, text=f"{text}, {days}", advice=advice if left < SOON else ""
    )


def clocks(ahead_s: Mapping[str, float]) -> Finding:
    """Do the clocks of services and of this machine agree with the store's?

    Args:
        ahead_s: Time by which the clock of each service is ahead of this machine's, seconds.
    """
    if STORE not in ahead_s:
        return Finding(what="clocks", ok=None, text="not compared: the store did not report its time")
    store_s = ahead_s[STORE]
    found = {name: each - store_s for name, each in ahead_s.items() if name != STORE} | {"this machine": -store_s}
    wrong = [
        f"{name} is {abs(each):.1f} s {'ahead of' if each > 0 else 'behind'} the store"
        for name, each in found.items()
        if abs(each) > SKEW_S
    ]
    if wrong:
        advice = "Synchronise the clocks, for example by NTP: tokens and deadlines depend on them."
        return Finding(what="clocks", ok=False, text="; ".join(wrong), advice=advice)
    return Finding(what="clocks", ok=True, text=f"all within {SKEW_S:.0f} s of the store's")


async def _health(connection: Connection, target: str, *, service: str = "") -> _Answer:
    """Calls a few times; the latency is the median, without the first connection."""
    took: list[float] = []
    status = None
    async with connection.channel(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            for _ in range(PROBES + 1):
                begun = time.monotonic()
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LIMIT_S)
                took.append(time.monotonic() - begun)
                status = answer.status
            ahead_s = await _ahead_s(channel)
        except FulmenError as error:
            return _Answer(problem=error.message)
    return _Answer(status=status, latency_s=statistics.median(took[1:]), ahead_s=ahead_s)


async def _ahead_s(channel: FulmenChannel) -> float | None:
    """Returns how far a service's clock is ahead of this machine's, up to half of a call; None if it does not report
    its time."""
    begun_s = time.time()
    call = health_pb2_grpc.HealthStub(channel.plain()).Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
    try:
        told = dict(await call.trailing_metadata() or ()).get(CLOCK_METADATA_KEY, "")
    except grpc.RpcError:
        return None
    return int(told) / 1e9 - (begun_s + time.time()) / 2 if str(told).isdecimal() else None


def _service(name: str, target: str, answer: _Answer, *, meant: bool) -> Finding:
    """Checks a service; one that was not named may be missing at its default address."""
    if answer.status is None and not meant:
        return Finding(
            what=name, ok=None, text=f"not named, and not at {target}", advice=f"Name it with {_option(name)}."
        )
    if answer.status is None:
        advice = (
            f"Is it running, and is this its gRPC port? See `fulmen status`, its log, or name it with {_option(name)}."
        )
        return Finding(what=name, ok=False, text=f"{target} does not answer: {answer.problem}", advice=advice)
    if answer.status != SERVING:
        return Finding(
            what=name,
            ok=False,
            text=f"{target} answers but is not ready",
            advice="It is starting or stopping; see its log.",
        )
    slow = answer.latency_s > SLOW_S
    advice = "Runners may see the same latency: move the services closer together." if slow else ""
    text = f"{target} serves, {answer.latency_s * 1000:.1f} ms"
    return Finding(what=name, ok=None if slow else True, text=text, advice=advice)


def _option(name: str) -> str:
    return {"store": "--store-target", "algorithm": "--algorithm-target"}.get(name, "--llm-proxy-target")


def _database(answer: _Answer) -> Finding:
    if answer.status == SERVING:
        return Finding(what="database", ok=True, text="the store can reach its database")
    return Finding(
        what="database",
        ok=False,
        text="the store has no database, and refuses calls that need a commit",
        advice="Check PostgreSQL's log, disk and connections; the store reconnects by itself.",
    )


async def _queue(client: Services) -> list[Finding]:
    try:
        stats = await client.rollouts.GetQueueStats(rollout_service_pb2.GetQueueStatsRequest(), timeout=LIMIT_S)
    except (TokenInvalid, PermissionDenied) as error:
        advice = "Use a token of this deployment: `fulmen token issue`, or `fulmen token --role admin`."
        return [Finding(what="access", ok=False, text=f"the store refuses the token: {error.message}", advice=advice)]
    except FulmenError as error:
        return [Finding(what="queue", ok=False, text=f"unknown: {error.message}", advice="See its log.")]
    text = f"{stats.queued_count} queued, {stats.running_count} running, {stats.runner_count} runners with {stats.open_credit_count} free slots"
    if stats.runner_count == 0:
        advice = "Start runners, and see the log of those that run: their token, their --store-target."
        return [Finding(what="queue", ok=False, text=f"{text}: no runner is connected", advice=advice)]
    found = [Finding(what="queue", ok=True, text=text)]
    if paused := pause_text(stats):
        found.append(Finding(what="pause", ok=None, text=f"the queue is {paused}"))
    if stats.paused_agents:
        agents = ", ".join(each.agent for each in stats.paused_agents)
        text = f"paused, because their rollouts ended with lost runners: {agents}"
        advice = "See their last rollouts with `fulmen queue`; `fulmen agent resume` resumes them."
        found.append(Finding(what="agents", ok=False, text=text, advice=advice))
    if stats.unmatched:
        labels = "; ".join(",".join(f"{k}={v}" for k, v in sorted(each.labels.items())) for each in stats.unmatched)
        advice = "Start runners with these labels (FULMEN_RUNNER_LABELS)."
        found.append(
            Finding(
                what="labels",
                ok=False,
                text=f"no runner has labels that queued rollouts require: {labels}",
                advice=advice,
            )
        )
    return found


async def _runners(client: Services) -> list[Finding]:
    try:
        listed = await client.runners.ListRunners(
            runner_registry_service_pb2.ListRunnersRequest(page_size=PAGE_SIZE), timeout=LIMIT_S
        )
    except FulmenError:
        return []
    ours = metadata.version("fulmen")
    others = sorted({each.info.version for each in listed.runners} - {ours, ""})
    if others:
        text = f"this is {ours}, runners are {', '.join(others)}"
        advice = "One release apart works; see docs/upgrading.md for the order."
        return [Finding(what="skew", ok=None, text=text, advice=advice)]
    return [Finding(what="skew", ok=True, text=f"client and all runners are {ours}")]


async def _newest(client: Services, kind: str) -> list[resource_pb2.ResourceVersion]:
    """Returns the newest version of every resource of a kind."""
    request, found = resource_service_pb2.ListResourceVersionsRequest(kind=kind, page_size=PAGE_SIZE), []
    while True:
        listed = await client.resources.ListResourceVersions(request, timeout=LIMIT_S)
        found += listed.resources
        request.page_token = listed.next_page_token
        if not listed.next_page_token:
            return found


async def _resources(client: Services) -> list[Finding]:
    """Are the newest versions that services act on readable?"""
    problems: list[str] = []
    try:
        for kind in CHECKED_KINDS:
            for version in await _newest(client, kind):
                (found,) = await read_resources(client.resources, [version.name], timeout=LIMIT_S)
                problems += [
                    f"{version.name}: {problem.field} {problem.description}"
                    for problem in content_problems(kind, found.content)
                ]
    except FulmenError as error:
        return [Finding(what="resources", ok=None, text=f"not checked: {error.message}", advice="See the store's log.")]
    if problems:
        advice = "Services ignore them. Publish a new version, or put the route or backend again."
        return [Finding(what="resources", ok=False, text=f"unreadable: {'; '.join(problems)}", advice=advice)]
    return [Finding(what="resources", ok=True, text="services can read all resources that they use")]


async def _unowned_runs(client: Services) -> list[Finding]:
    """Does an algorithm service run each training run that is not paused?"""
    request = run_lease_service_pb2.ListRunLeasesRequest(without_records=True, page_size=PAGE_SIZE)
    request.unowned_for.FromSeconds(UNOWNED_S)
    try:
        leases = (await client.run_leases.ListRunLeases(request, timeout=LIMIT_S)).leases
    except FulmenError as error:
        return [Finding(what="runs", ok=None, text=f"not checked: {error.message}", advice="See the store's log.")]
    unowned = [each.training_run for each in leases if each.state == run_lease_service_pb2.RUN_LEASE_STATE_RUNNING]
    if unowned:
        text = f"no algorithm service runs {', '.join(unowned[:RUNS_SHOWN])}"
        advice = (
            "Start an algorithm service with the same run_storage and a free run slot, or stop the runs (docs/runs.md)."
        )
        return [Finding(what="runs", ok=False, text=text, advice=advice)]
    return [Finding(what="runs", ok=True, text="every running training run has an algorithm service")]


async def _engines(client: Services) -> list[Finding]:
    """Asks the algorithm service for the engines of its newest training runs."""
    request = training_run_service_pb2.ListTrainingRunsRequest(page_size=PAGE_SIZE)
    try:
        return engines((await client.training_runs.ListTrainingRuns(request, timeout=LIMIT_S)).training_runs)
    except FulmenError as error:
        return [Finding(what="engines", ok=None, text=f"not checked: {error.message}", advice="See its log.")]


def engines(runs: Sequence[training_run_pb2.TrainingRun]) -> list[Finding]:
    """Do all engines of the training runs accept calls? Runs without engines are not reported."""
    serving = [run for run in runs if run.engine_count]
    if not serving:
        return []
    short = [run for run in serving if run.ready_engine_count < run.engine_count]
    if short:
        counts = [f"{each.ready_engine_count} of {each.engine_count} of {each.name}" for each in short[:RUNS_SHOWN]]
        advice = "They are starting or being restarted: `fulmen run watch` shows why (docs/engines.md)."
        return [Finding(what="engines", ok=None, text=f"ready: {', '.join(counts)}", advice=advice)]
    return [Finding(what="engines", ok=True, text=f"all {sum(run.engine_count for run in serving)} accept calls")]


async def _backends(connection: Connection, target: str, what: str) -> Finding:
    async with connection.channel(target) as channel:
        stub = BackendServiceStub(channel)
        try:
            answer = await stub.GetBackendHealth(backend_service_pb2.GetBackendHealthRequest(), timeout=LIMIT_S)
        except FulmenError as error:
            advice = "See its log."
            return Finding(what=what, ok=False, text=f"unknown: {error.message}", advice=advice)
    return backends(answer.backends, what)


def backends(seen: Sequence[backend_pb2.BackendHealth], what: str) -> Finding:
    """Do all backends take calls, as one proxy sees them?"""
    if not seen:
        advice = "Training runs add their own; add others with `fulmen proxy backend add`."
        return Finding(what=what, ok=None, text="none", advice=advice)
    ill = [
        f"{each.name} ({enum_word(each, 'breaker').replace('_', ' ')}, last failure: {each.last_failure_kind or 'unknown'})"
        for each in seen
        if not each.healthy
    ]
    ill += [
        f"{each.name} (held: it answered with the old policy version {each.stale_version})"
        for each in seen
        if each.stale_version
    ]
    if ill:
        advice = "See `fulmen proxy health` and the engine's log; remove one with `fulmen proxy backend delete`."
        if any(each.last_failure_kind == "litellm_not_installed" for each in seen):
            advice = (
                "Make LiteLLM's environment with tools/litellm_env.sh, and name its Python in "
                "FULMEN_LLM_PROXY_LITELLM_PYTHON (docs/backends.md, Other vendors)."
            )
        return Finding(what=what, ok=False, text=f"failing: {', '.join(ill)}", advice=advice)
    return Finding(what=what, ok=True, text=f"all {len(seen)} are healthy")


async def _call(client: Services, model: str) -> Finding:
    """Calls a model for one token with its id, as every captured call does."""
    if not model:
        return Finding(what="capture", ok=None, text="not checked", advice="Check a model with --call MODEL.")
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1,
            "logprobs": True, "return_token_ids": True}  # fmt: skip
    request = completion_service_pb2.CompleteRequest(path="/v1/chat/completions", body_json=json.dumps(body).encode())
    try:
        answer = await client.completions.Complete(request, timeout=CALL_LIMIT_S)
    except FulmenError as error:
        return Finding(what="capture", ok=False, text=f"{model} cannot be called: {error.message}", advice=_MODELS)
    document = json.loads(answer.body_json or b"{}")
    if answer.http_status != OK:
        problem = (document.get("error") or {}).get("message", "")
        return Finding(
            what="capture", ok=False, text=f"{model} answers {answer.http_status}: {problem}", advice=_MODELS
        )
    choice = (document.get("choices") or [{}])[0]
    if choice.get("token_ids") and choice.get("logprobs"):
        return Finding(what="capture", ok=True, text=f"{model} returns token ids and log-probabilities")
    return Finding(
        what="capture",
        ok=False,
        text=f"{model} answers without token ids or log-probabilities: its calls cannot train",
        advice="See docs/engines.md for the engine's settings; vendors' models do not return them.",
    )


_MODELS: Final = "`fulmen proxy routes` lists the models, `fulmen proxy health` shows the health of their backends."
