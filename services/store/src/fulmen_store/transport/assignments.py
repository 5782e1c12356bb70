"""Packs assignments into messages, and records what durations of task types bound their attempts to."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from uuid import UUID

from google.protobuf.message import DecodeError

from fulmen.errors import DatabaseUnavailable
from fulmen.store.v1 import lease_service_pb2 as pb
from fulmen_service_kit.rpc.message_sizes import ANSWER_BYTES
from fulmen_service_kit.security.tokens import TokenSigner
from fulmen_store.leases.leases import Grant
from fulmen_store.leases.table import AttemptBoundTable
from fulmen_store.scheduling.durations import DurationTracker
from fulmen_store.scheduling.runner_streams import ASSIGNMENT_BYTES
from fulmen_store.transport.wire.rollouts import write_assignment

__all__ = ["Assignments"]


class Assignments:
    """Encodes granted leases."""

    def __init__(self, *, signer: TokenSigner, durations: DurationTracker, bounds: AttemptBoundTable) -> None:
        """Creates the encoder; `signer` signs attempt keys."""
        self._signer = signer
        self._durations = durations
        self._bounds = bounds
        self._unrecorded: list[tuple[UUID, UUID, int, int]] = []

    def packed(self, grants: Iterable[Grant], unreadable: list[Grant]) -> Iterable[pb.StreamLeasesResponse]:
        """Yields assignments, but those whose stored requests are unreadable are added to that list."""
        message, size_bytes = pb.StreamLeasesResponse(), 0
        for grant in grants:
            more_bytes = len(grant.request) + ASSIGNMENT_BYTES
            if size_bytes and size_bytes + more_bytes > ANSWER_BYTES:
                yield message
                message, size_bytes = pb.StreamLeasesResponse(), 0
            try:
                bound_s = write_assignment(message.assign.assignments.add(), grant, self._signer, self._durations)
            except DecodeError:
                del message.assign.assignments[-1]
                unreadable.append(grant)
                continue
            size_bytes += more_bytes
            if bound_s is not None:
                self._unrecorded.append((grant.rollout_id, grant.session_id, grant.epoch, round(bound_s * 1000)))
        if message.assign.assignments:
            yield message

    async def record_bounds(self) -> None:
        """Records the bounds of what was packed, by which the store ends attempts that their runners do not.

        Without the database, it ends them by the timeout of their policy.
        """
        bounds, self._unrecorded = self._unrecorded, []
        if bounds:
            with suppress(DatabaseUnavailable):
                await self._bounds.add(bounds)
