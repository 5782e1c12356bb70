"""Leases of runs at the store; see `runs.ports.RunLeases`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import run_lease_service_pb2 as pb
from fulmen.store.v1.run_lease_service_pb2_grpc import RunLeaseServiceStub
from fulmen_algorithm.runs.ports import LeaseRenewal, LeaseState, RunFence, RunLease, RunRecord

CALL_DEADLINE_S = 10.0
COMMITS_IN_PROGRESS = timedelta(seconds=30)
"""Longer than any transaction of the store, which is when a change becomes visible after its time."""
RENEWALS_PER_CALL = 1000
MAX_RECORDS_BYTES = 2 * 2**20


class StoreRunLeases:
    """The leases of runs, for the service with this id and address."""

    def __init__(
        self, channel: FulmenChannel, *, owner: str, storage: str, address: Callable[[], str], ttl_s: float
    ) -> None:
        """`address` returns `host:port` once the service listens."""
        self._stub = RunLeaseServiceStub(channel)
        self._owner = owner
        self._storage = storage
        self._address = address
        self._ttl = timedelta(seconds=ttl_s)
        self._listed_until: Timestamp | None = None

    async def create(self, runs: Sequence[RunRecord], *, request_id: str) -> None:
        """Records a run and the stages that follow it."""
        first, *following = runs
        request = pb.CreateRunLeaseRequest(
            training_run=first.training_run,
            policy=first.policy,
            record=first.record,
            request_id=request_id,
            storage=self._storage,
            next_stages=[
                pb.NextStage(training_run=each.training_run, policy=each.policy, record=each.record)
                for each in following
            ],
        )
        await self._stub.CreateRunLease(request, timeout=CALL_DEADLINE_S)

    async def acquire(self, training_run: str, *, after_epoch: int, for_change: bool = False) -> int:
        """Acquires a lease; returns its epoch."""
        request = pb.AcquireRunLeaseRequest(
            training_run=training_run,
            owner=self._owner,
            owner_address=self._address(),
            ttl=self._ttl,
            after_epoch=after_epoch,
            storage=self._storage,
            for_change=for_change,
        )
        answer = await self._stub.AcquireRunLease(request, timeout=CALL_DEADLINE_S)
        return answer.lease.epoch

    async def renew(self, renewals: Sequence[LeaseRenewal]) -> set[str]:
        """Renews leases; returns the runs whose leases are lost."""
        lost: set[str] = set()
        for part in _parts(renewals):
            request = pb.RenewRunLeasesRequest(
                owner=self._owner,
                owner_address=self._address(),
                ttl=self._ttl,
                leases=[
                    pb.RenewedLease(
                        training_run=each.fence.training_run,
                        epoch=each.fence.epoch,
                        record=each.record,
                    )
                    for each in part
                ],
            )
            answer = await self._stub.RenewRunLeases(request, timeout=CALL_DEADLINE_S)
            lost.update(answer.lost_training_runs)
        return lost

    async def release(self, fence: RunFence, *, state: LeaseState, record: bytes) -> None:
        """Ends a lease."""
        request = pb.ReleaseRunLeaseRequest(
            training_run=fence.training_run,
            epoch=fence.epoch,
            state=pb.RunLeaseState.Value(f"RUN_LEASE_STATE_{state.value}"),
            record=record,
        )
        await self._stub.ReleaseRunLease(request, timeout=CALL_DEADLINE_S)

    async def changed(self) -> list[RunLease]:
        """Lists the runs whose lease or record has changed since the last call."""
        found: list[RunLease] = []
        token, listed_at = "", None
        while True:
            request = pb.ListRunLeasesRequest(page_size=1000, page_token=token)
            if self._listed_until is not None:
                request.update_after_time.CopyFrom(self._listed_until)
            page = await self._stub.ListRunLeases(request, timeout=CALL_DEADLINE_S)
            if self._listed_until is not None and page.store_time.ToDatetime() < self._listed_until.ToDatetime():
                # The clock was set back: what has changed since bears an earlier time.
                self._listed_until, token, listed_at, found = None, "", None, []
                continue
            listed_at = listed_at or page.store_time
            found += [_lease(each, page.store_time) for each in page.leases]
            token = page.next_page_token
            if not token:
                break
        self._listed_until = Timestamp()
        self._listed_until.FromDatetime(listed_at.ToDatetime() - COMMITS_IN_PROGRESS)
        return found


def _parts(renewals: Sequence[LeaseRenewal]) -> list[list[LeaseRenewal]]:
    """Distributes renewals over requests of bounded size."""
    parts: list[list[LeaseRenewal]] = []
    size = 0
    for each in renewals:
        size += len(each.record)
        if not parts or len(parts[-1]) == RENEWALS_PER_CALL or size > MAX_RECORDS_BYTES:
            parts.append([])
            size = len(each.record)
        parts[-1].append(each)
    return parts


def _lease(message: pb.RunLease, now: Timestamp) -> RunLease:
    left = message.expire_time.ToDatetime() - now.ToDatetime()
    return RunLease(
        training_run=message.training_run,
        owner=message.owner,
        owner_address=message.owner_address,
        epoch=message.epoch,
        held_s=max(left.total_seconds(), 0.0) if message.held else 0.0,
        record=message.record,
        storage=message.storage,
    )
