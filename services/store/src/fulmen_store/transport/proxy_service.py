"""`ProxyService` over gRPC: the processes of the LLM proxy, and what they still have to deliver."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

import grpc.aio

from fulmen.errors import Violation
from fulmen.ids import AttemptName, parse_attempt_name
from fulmen.store.v1 import proxy_service_pb2 as pb
from fulmen.store.v1 import proxy_service_pb2_grpc
from fulmen_service_kit.security.auth import current_caller
from fulmen_store.malformed import malformed_request
from fulmen_store.projects.names import NO_PROJECT, ProjectNames
from fulmen_store.proxies.table import AccountRow, AttemptKey, Counts, ProxyTable, Totals

__all__ = ["ProxyService"]

MAX_ATTEMPTS: Final = 1000
MAX_COUNT: Final = 10**15
_INSTANCE: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_COUNTS: Final = (
    "call_count", "infra_failure_count", "unusable_count", "prompt_token_count", "completion_token_count", "throttled_count",
)  # fmt: skip


class ProxyService(proxy_service_pb2_grpc.ProxyServiceServicer):
    """Serves proxies and their accounts of attempts."""

    def __init__(self, *, table: ProxyTable, projects: ProjectNames) -> None:
        self._table = table
        self._projects = projects

    async def SyncProxy(self, request: pb.SyncProxyRequest, context: grpc.aio.ServicerContext) -> pb.SyncProxyResponse:
        """Stores accounts first, so that a process that is known to leave has none that is open."""
        problems = list(_problems(request.instance_id, request.accounts))
        if problems:
            raise malformed_request(problems)
        scope = current_caller().project
        names = [parse_attempt_name(each.attempt, field="accounts.attempt") for each in request.accounts]
        keys = await self._keys(names)
        # The last one of an attempt counts.
        rows = {key: account for key, account in zip(keys, request.accounts, strict=True) if key is not None}
        if rows:
            accounts = [AccountRow(key=key, is_open=each.open, counts=_counts(each)) for key, each in rows.items()]
            await self._table.save(request.instance_id, scope=scope, accounts=accounts)
        now, others = await self._table.renew(
            request.instance_id, scope=scope, serves_alone=request.serves_alone, is_leaving=request.leaving
        )
        response = pb.SyncProxyResponse(other_count=others)
        response.store_time.FromDatetime(now)
        return response

    async def GetCaptureTotals(
        self, request: pb.GetCaptureTotalsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetCaptureTotalsResponse:
        """Sums up accounts."""
        if len(request.attempts) > MAX_ATTEMPTS:
            raise malformed_request([_too_many("attempts")])
        keys = await self._keys([parse_attempt_name(each, field="attempts") for each in request.attempts])
        known = [key for key in keys if key is not None]
        found = iter(await self._table.totals(known, but=request.except_instance_id) if known else ())
        totals = [Totals() if key is None else next(found) for key in keys]
        return pb.GetCaptureTotalsResponse(
            totals=[_message(name, each) for name, each in zip(request.attempts, totals, strict=True)]
        )

    async def _keys(self, names: Sequence[AttemptName]) -> list[AttemptKey | None]:
        """Returns the keys of attempts; None for those that the caller has no access to, or of unknown projects."""
        caller = current_caller()
        numbers = await self._projects.find_all(name.project for name in names if caller.may_access(name.project))
        return [
            (name.rollout_id, name.number, number) if (number := numbers.get(name.project, NO_PROJECT)) else None
            for name in names
        ]


def _problems(instance_id: str, accounts: Sequence[pb.CaptureAccount]) -> Iterator[Violation]:
    if not _INSTANCE.fullmatch(instance_id):
        yield Violation(field="instance_id", description="is not 1 to 64 of [A-Za-z0-9-]")
    if len(accounts) > MAX_ATTEMPTS:
        yield _too_many("accounts")
    for index, each in enumerate(accounts[:MAX_ATTEMPTS]):
        if not all(0 <= getattr(each, name) <= MAX_COUNT for name in _COUNTS):
            yield Violation(field=f"accounts[{index}]", description="has a number outside 0 to 10^15")


def _too_many(field: str) -> Violation:
    return Violation(field=field, description=f"has more than {MAX_ATTEMPTS} entries")


def _counts(account: pb.CaptureAccount) -> Counts:
    return Counts(
        calls=account.call_count,
        infra_failures=account.infra_failure_count,
        unusable=account.unusable_count,
        prompt_tokens=account.prompt_token_count,
        completion_tokens=account.completion_token_count,
        throttled=account.throttled_count,
    )


def _message(attempt: str, totals: Totals) -> pb.CaptureTotals:
    counts = totals.counts
    account = pb.CaptureAccount(
        attempt=attempt,
        open=totals.is_open,
        call_count=counts.calls,
        infra_failure_count=counts.infra_failures,
        unusable_count=counts.unusable,
        prompt_token_count=counts.prompt_tokens,
        completion_token_count=counts.completion_tokens,
        throttled_count=counts.throttled,
    )
    return pb.CaptureTotals(sum=account, lost=totals.is_lost)
