"""Finished groups as messages: read in small batches, packed into messages of about 1 MiB."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Final
from uuid import UUID

from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_store.rollouts.feed import FeedPage, FinishedGroup
from fulmen_store.rollouts.feed_cursor import Selection
from fulmen_store.rollouts.table import AttemptView, RolloutTable
from fulmen_store.transport.rollout_codec import finished_rollout

__all__ = ["feed_messages"]

MESSAGE_BYTES: Final = 1024 * 1024
BATCH_MEMBERS: Final = 256


async def feed_messages(
    page: FeedPage, selection: Selection, table: RolloutTable
) -> AsyncIterator[pb.WatchRolloutsResponse]:
    """Yields the messages of a page; the next batch is read when the messages of the one before were taken."""
    message, size_bytes = pb.WatchRolloutsResponse(), 0
    for batch in _batches(page.groups):
        for finished in await _read(batch, selection, table):
            size_bytes += finished.ByteSize()
            if message.groups and size_bytes > MESSAGE_BYTES:
                yield message
                message, size_bytes = pb.WatchRolloutsResponse(), finished.ByteSize()
            message.groups.append(finished)
            message.cursor = finished.cursor
    message.cursor = page.cursor.encode(selection)
    yield message


def _batches(groups: Sequence[FinishedGroup]) -> Iterator[list[FinishedGroup]]:
    """Splits groups so that each batch has few members, unless one group alone has many."""
    batch: list[FinishedGroup] = []
    members = 0
    for group in groups:
        members += len(group.rollout_ids)
        if batch and members > BATCH_MEMBERS:
            yield batch
            batch, members = [], len(group.rollout_ids)
        batch.append(group)
    if batch:
        yield batch


async def _read(groups: Sequence[FinishedGroup], selection: Selection, table: RolloutTable) -> list[pb.FinishedGroup]:
    ids = [rollout_id for group in groups for rollout_id in group.rollout_ids]
    views = {view.rollout_id: view for view in await table.view(ids)}
    attempts: dict[UUID, list[AttemptView]] = {}
    for attempt in await table.attempts(ids):
        attempts.setdefault(attempt.rollout_id, []).append(attempt)
    read = []
    for group in groups:
        members = [
            finished_rollout(views[rollout_id], attempts.get(rollout_id, [])) for rollout_id in group.rollout_ids
        ]
        read.append(
            pb.FinishedGroup(
                group_id=members[0].group_id or members[0].name,
                rollouts=members,
                cursor=group.cursor.encode(selection),
            )
        )
    return read
