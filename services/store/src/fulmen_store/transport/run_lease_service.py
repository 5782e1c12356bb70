"""`RunLeaseService` over gRPC: which algorithm service runs which training run."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.errors import Violation
from fulmen.ids import MAX_TRAINING_RUN, parse_training_run_name
from fulmen.store.v1 import run_lease_service_pb2 as pb
from fulmen.store.v1 import run_lease_service_pb2_grpc
from fulmen_service_kit.security.auth import require_project
from fulmen_store.malformed import malformed
from fulmen_store.projects.names import NO_PROJECT, ProjectNames
from fulmen_store.run_leases.run_leases import (
    MAX_POLICY,
    MAX_REQUEST_ID,
    MAX_STORAGE,
    Holder,
    NewRun,
    Renewal,
    RunFence,
    RunLease,
    RunLeaseState,
    check_epoch,
    check_holder,
    check_record,
    require_valid,
)
from fulmen_store.run_leases.table import RunLeaseTable
from fulmen_store.transport.access import project_limit
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size

__all__ = ["RunLeaseService"]

DEFAULT_PAGE: Final = 100
MAX_RENEWALS: Final = 1000
MAX_RECORDS_BYTES: Final = 3 * 1024 * 1024
MAX_NEXT_STAGES: Final = 15
NUMBER_BYTES: Final = 4
FIRST: Final = (0, "")


class RunLeaseService(run_lease_service_pb2_grpc.RunLeaseServiceServicer):
    """Serves leases of training runs."""

    def __init__(self, *, table: RunLeaseTable, projects: ProjectNames) -> None:
        self._table = table
        self._projects = projects

    async def CreateRunLease(
        self, request: pb.CreateRunLeaseRequest, context: grpc.aio.ServicerContext
    ) -> pb.CreateRunLeaseResponse:
        """Records a run that waits for an owner, and the stages that follow it."""
        project = _project_of(request.training_run)
        require_valid(
            [
                *_new_run_problems(request, ""),
                *_text_problems(
                    request_id=(request.request_id, MAX_REQUEST_ID), storage=(request.storage, MAX_STORAGE)
                ),
                *_stage_problems(request.next_stages, project),
            ]
        )
        runs = [
            NewRun(training_run=each.training_run, policy=each.policy, record=each.record)
            for each in (request, *request.next_stages)
        ]
        runs[0] = replace(runs[0], request_id=request.request_id)
        leases = await self._table.create(await self._projects.require(project), runs, storage=request.storage)
        return pb.CreateRunLeaseResponse(lease=_message(leases[request.training_run]))

    async def AcquireRunLease(
        self, request: pb.AcquireRunLeaseRequest, context: grpc.aio.ServicerContext
    ) -> pb.AcquireRunLeaseResponse:
        """Acquires the lease of a run."""
        project = _project_of(request.training_run)
        holder = replace(_holder(request.owner, request.owner_address, request.ttl), storage=request.storage)
        require_valid([*check_holder(holder), *check_epoch("after_epoch", request.after_epoch)])
        project_id = await self._projects.require(project)
        lease = await self._table.acquire(
            project_id,
            request.training_run,
            holder,
            after_epoch=request.after_epoch,
            for_change=request.for_change,
        )
        return pb.AcquireRunLeaseResponse(lease=_message(lease))

    async def RenewRunLeases(
        self, request: pb.RenewRunLeasesRequest, context: grpc.aio.ServicerContext
    ) -> pb.RenewRunLeasesResponse:
        """Renews leases of one owner."""
        holder = _holder(request.owner, request.owner_address, request.ttl)
        violations = [*check_holder(holder), *_renewal_problems(request.leases)]
        require_valid(violations)
        projects = [_project_of(each.training_run) for each in request.leases]
        numbers = await self._projects.find_all(projects)
        renewals = [
            Renewal(project_id=numbers[project], training_run=each.training_run, epoch=each.epoch, record=each.record)
            for project, each in zip(projects, request.leases, strict=True)
        ]
        held = await self._table.renew(holder, renewals)
        lost = [each.training_run for each in renewals if (each.project_id, each.training_run) not in held]
        return pb.RenewRunLeasesResponse(lost_training_runs=lost)

    async def ReleaseRunLease(
        self, request: pb.ReleaseRunLeaseRequest, context: grpc.aio.ServicerContext
    ) -> pb.ReleaseRunLeaseResponse:
        """Ends a lease."""
        project = _project_of(request.training_run)
        violations = [*check_epoch("epoch", request.epoch), *check_record("record", request.record)]
        if request.state not in {state.value for state in RunLeaseState}:
            violations.append(Violation(field="state", description="is not a state of a run"))
        require_valid(violations)
        await self._table.release(
            await self._projects.require(project),
            RunFence(training_run=request.training_run, epoch=request.epoch),
            state=RunLeaseState(request.state),
            record=request.record,
        )
        return pb.ReleaseRunLeaseResponse()

    async def ListRunLeases(
        self, request: pb.ListRunLeasesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListRunLeasesResponse:
        """Lists recorded runs with their leases."""
        project = require_project(request.project) if request.project else project_limit()
        listed = f"runLeases/{project}"
        after = _decode_key(decode_token(request.page_token, listed=listed, key_bytes=NUMBER_BYTES + MAX_TRAINING_RUN))
        now = await self._table.clock()
        found = await self._table.page(
            after=after,
            projects=None if project is None else [await self._projects.find(project) or NO_PROJECT],
            updated_after=_moment(request.update_after_time) if request.HasField("update_after_time") else None,
            unowned_for_s=_seconds(request.unowned_for) if request.HasField("unowned_for") else None,
            with_records=not request.without_records,
            limit=page_size(request.page_size, default=DEFAULT_PAGE),
        )
        answer = pb.ListRunLeasesResponse(
            leases=[_message(lease) for lease in found],
            # A page may be short because of large records: only an empty one is the last.
            next_page_token=encode_token(_key(found[-1]), listed=listed) if found else "",
        )
        answer.store_time.FromDatetime(now)
        return answer


def _project_of(training_run: str) -> str:
    """Returns the project of a run, which the caller may access.

    Raises:
        ArgumentInvalid: If the name is malformed.
        PermissionDenied: If the caller is bound to another project.
    """
    return require_project(parse_training_run_name(training_run).project)


def _new_run_problems(run: pb.CreateRunLeaseRequest | pb.NextStage, prefix: str) -> list[Violation]:
    return [
        *check_record(f"{prefix}record", run.record),
        *_text_problems(**{f"{prefix}policy": (run.policy, MAX_POLICY)}),
    ]


def _text_problems(**texts: tuple[str, int]) -> list[Violation]:
    """Returns the fields whose text is longer than its limit."""
    return [
        Violation(field=field, description=f"is longer than {limit} characters")
        for field, (text, limit) in texts.items()
        if len(text) > limit
    ]


def _stage_problems(stages: Sequence[pb.NextStage], project: str) -> list[Violation]:
    if len(stages) > MAX_NEXT_STAGES:
        return [Violation(field="next_stages", description=f"has {len(stages)} entries, allowed are {MAX_NEXT_STAGES}")]
    found = _records_problems("next_stages", stages)
    for index, each in enumerate(stages):
        found += _new_run_problems(each, f"next_stages[{index}].")
        if _project_of(each.training_run) != project:
            found.append(Violation(field=f"next_stages[{index}].training_run", description=f"is not in {project}"))
    return found


def _records_problems(field: str, runs: Sequence[pb.NextStage | pb.RenewedLease]) -> list[Violation]:
    if (total := sum(len(each.record) for each in runs)) <= MAX_RECORDS_BYTES:
        return []
    text = f"have records of {total} bytes, allowed are {MAX_RECORDS_BYTES}"
    return [Violation(field=field, description=text)]


def _renewal_problems(leases: Sequence[pb.RenewedLease]) -> list[Violation]:
    if len(leases) > MAX_RENEWALS:
        return [Violation(field="leases", description=f"has {len(leases)} entries, allowed are {MAX_RENEWALS}")]
    found = [
        problem
        for index, each in enumerate(leases)
        for problem in (
            *check_epoch(f"leases[{index}].epoch", each.epoch),
            *check_record(f"leases[{index}].record", each.record),
        )
    ]
    return [*found, *_records_problems("leases", leases)]


def _holder(owner: str, address: str, ttl: Duration) -> Holder:
    return Holder(owner=owner, address=address, ttl_s=_seconds(ttl))


def _seconds(duration: Duration) -> float:
    return float(duration.seconds + duration.nanos / 1e9)


def _moment(field: Timestamp) -> datetime.datetime:
    try:
        return field.ToDatetime(tzinfo=datetime.UTC)
    except (ValueError, OverflowError):
        raise malformed("update_after_time", "is not a time between the years 1 and 9999") from None


def _key(lease: RunLease) -> bytes:
    return lease.project_id.to_bytes(NUMBER_BYTES) + lease.training_run.encode().ljust(MAX_TRAINING_RUN, b"\0")


def _decode_key(key: bytes | None) -> tuple[int, str]:
    if key is None:
        return FIRST
    return int.from_bytes(key[:NUMBER_BYTES]), key[NUMBER_BYTES:].rstrip(b"\0").decode("utf-8", "replace")


def _message(lease: RunLease) -> pb.RunLease:
    message = pb.RunLease(
        training_run=lease.training_run,
        policy=lease.policy,
        state=pb.RunLeaseState.ValueType(lease.state.value),
        owner=lease.owner,
        owner_address=lease.owner_address,
        epoch=lease.epoch,
        held=lease.held,
        record=lease.record,
        storage=lease.storage,
    )
    message.expire_time.FromDatetime(lease.expires_at)
    message.update_time.FromDatetime(lease.updated_at)
    return message
