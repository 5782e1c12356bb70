"""Checks of a deployment. Read-only; every wait is short."""

from __future__ import annotations

import asyncio
import datetime
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from grpc_health.v1 import health_pb2, health_pb2_grpc

from fulmen.client import Client
from fulmen.errors import FulmenError, PermissionDenied, TokenInvalid
from fulmen.llm_proxy.v1 import backend_service_pb2, completion_service_pb2
from fulmen.llm_proxy.v1.backend_service_pb2_grpc import BackendServiceStub
from fulmen.store.v1 import rollout_service_pb2, runner_registry_service_pb2
from fulmen_cli.connection import Connection, claims_of
from fulmen_cli.doctor.finding import Finding
from fulmen_cli.output import enum_word

__all__ = ["clock_of", "deployment", "token"]

LIMIT_S: Final = 5.0
CALL_LIMIT_S: Final = 60.0
PROBES: Final = 3
SLOW_S: Final = 0.25
PAGE_SIZE: Final = 1000
SOON: Final = datetime.timedelta(days=7)
# What the store's leases and two clocks that agree leave open.
SKEW: Final = datetime.timedelta(seconds=2)
STORE_READINESS: Final = "fulmen.store.v1"
ALL_PROJECTS: Final = "projects/*"
OK: Final = 200
SERVING: Final = health_pb2.HealthCheckResponse.SERVING


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """The result of a health check: its latency, or the problem."""

    status: int | None = None
    latency_s: float = 0.0
    problem: str = ""


async def deployment(connection: Connection, *, model: str = "") -> list[Finding]:
    """Checks a deployment: the caller's token, each service, the queue, its runners, the backends.

    Args:
        connection: where it is.
        model: asked for one token, if it is named.
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
            findings += [_database(ready), *await _queue(client), *await _runners(client, bearer)]
        # Each proxy has breakers of its own.
        for name, answer in health.items():
            if name.startswith("proxy") and answer.status is not None:
                findings.append(await _backends(connection, services[name], name.replace("proxy", "backends")))
        if health["proxy"].status is not None:
            findings.append(await _call(client, model))
    return findings


def token(bearer: str | None, now: datetime.datetime) -> Finding:
    """Is there a token, and is it good for longer? Its signature is the deployment's to judge."""
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


def clock_of(
    runners: Sequence[runner_registry_service_pb2.Runner], bearer: str | None, now: datetime.datetime
) -> Finding:
    """Does this machine's clock agree with the deployment's?

    A session was opened before the store's now, and its lease ends after it: that bounds the store's clock.
    """
    earliest = [each.create_time.ToDatetime(datetime.UTC) for each in runners]
    if (claims := claims_of(bearer or "")) and "iat" in claims:
        earliest.append(datetime.datetime.fromtimestamp(claims["iat"], datetime.UTC))
    latest = [each.lease_expire_time.ToDatetime(datetime.UTC) for each in runners]
    behind = max(earliest, default=now) - now
    ahead = now - min(latest, default=now)
    advice = "Set both clocks, best by NTP: tokens and deadlines go by them."
    if behind > SKEW:
        text = f"this machine is at least {behind.total_seconds():.0f} s behind the deployment"
        return Finding(what="clocks", ok=False, text=text, advice=advice)
    if ahead > SKEW:
        text = f"this machine is at least {ahead.total_seconds():.0f} s ahead of the deployment"
        return Finding(what="clocks", ok=False, text=text, advice=advice)
    return Finding(what="clocks", ok=True, text="in agreement with the deployment's")


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
        except FulmenError as error:
            return _Answer(problem=error.message)
    return _Answer(status=status, latency_s=statistics.median(took[1:]))


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
        text="the store has no database: it refuses what it cannot commit",
        advice="Check PostgreSQL's log, disk and connections; the store reconnects by itself.",
    )


async def _queue(client: Client) -> list[Finding]:
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


async def _runners(client: Client, bearer: str | None) -> list[Finding]:
    try:
        listed = await client.runners.ListRunners(
            runner_registry_service_pb2.ListRunnersRequest(page_size=PAGE_SIZE), timeout=LIMIT_S
        )
    except FulmenError:
        return []
    now = datetime.datetime.now(datetime.UTC)
    ours = metadata.version("fulmen")
    others = sorted({each.info.version for each in listed.runners} - {ours, ""})
    if others:
        text = f"this is {ours}, runners are {', '.join(others)}"
        advice = "One release apart works; see docs/upgrading.md for the order."
        versions = Finding(what="skew", ok=None, text=text, advice=advice)
    else:
        versions = Finding(what="skew", ok=True, text=f"client and all runners are {ours}")
    return [versions, clock_of(listed.runners, bearer, now)]


async def _backends(connection: Connection, target: str, what: str) -> Finding:
    async with connection.channel(target) as channel:
        stub = BackendServiceStub(channel)
        try:
            answer = await stub.GetBackendHealth(backend_service_pb2.GetBackendHealthRequest(), timeout=LIMIT_S)
        except FulmenError as error:
            advice = "See its log."
            return Finding(what=what, ok=False, text=f"unknown: {error.message}", advice=advice)
    if not answer.backends:
        advice = "Training runs add their own; add others with `fulmen proxy backend add`."
        return Finding(what=what, ok=None, text="none", advice=advice)
    ill = [
        f"{each.name} ({enum_word(each, 'breaker').replace('_', ' ')}, last failure: {each.last_failure_kind or 'unknown'})"
        for each in answer.backends
        if not each.healthy
    ]
    if ill:
        advice = "See `fulmen proxy health` and the engine's log; remove one with `fulmen proxy backend delete`."
        return Finding(what=what, ok=False, text=f"failing: {', '.join(ill)}", advice=advice)
    return Finding(what=what, ok=True, text=f"all {len(answer.backends)} are healthy")


async def _call(client: Client, model: str) -> Finding:
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


_MODELS: Final = "`fulmen proxy routes` lists the models, `fulmen proxy health` says how their backends do."
