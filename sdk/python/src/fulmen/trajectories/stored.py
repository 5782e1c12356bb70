"""Reads trajectories from the store, with the attempts' rewards.

Invariant: at most one page of names and the spans of a few attempts are in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final

from fulmen.model_call import ModelCallInvalid
from fulmen.rpc.services import Services
from fulmen.store.v1 import attempt_pb2, rollout_pb2, rollout_service_pb2, span_pb2, span_service_pb2
from fulmen.trajectories.trajectory import Trajectory, trajectory

PAGE_SIZE: Final = 256
ROLLOUTS_AT_ONCE: Final = 16
CALL_LIMIT_S: Final = 60.0
SPANS_LIMIT_S: Final = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredAttempt:
    """An attempt in the store.

    Attributes:
        rollout: The rollout with its attempts.
        attempt: The attempt that decided the rollout.
        trajectory: Its trajectory; None if its spans cannot be read or were not requested.
        problem: Why its spans cannot be read; empty otherwise.
    """

    rollout: rollout_pb2.Rollout
    attempt: attempt_pb2.Attempt
    trajectory: Trajectory | None
    problem: str = ""


async def stored_attempts(
    client: Services, request: rollout_service_pb2.ListRolloutsRequest, *, limit: int | None = None
) -> AsyncIterator[StoredAttempt]:
    """Yields the deciding attempts of the rollouts listed by a request, in its order.

    Undecided rollouts are skipped.

    Args:
        client: The services.
        request: Selects the rollouts; its page size and token are not used.
        limit: Maximum number of rollouts listed; None for all.
    """
    async for names in rollout_names(client, request, limit):
        for start in range(0, len(names), ROLLOUTS_AT_ONCE):
            for found in await read_stored(client, names[start : start + ROLLOUTS_AT_ONCE]):
                yield found


async def read_stored(client: Services, names: Sequence[str], *, with_spans: bool = True) -> list[StoredAttempt]:
    """Reads the deciding attempts of a few rollouts, all held in memory.

    Args:
        client: The services.
        names: The rollouts.
        with_spans: Whether to read their spans; without, there are no trajectories.

    Raises:
        RolloutNotFound: If a rollout does not exist.
    """
    rollouts = await asyncio.gather(*(_rollout(client, name) for name in names))
    decided = [(each, attempt) for each in rollouts if (attempt := deciding_attempt(each)) is not None]
    if not with_spans:
        return [StoredAttempt(rollout=each, attempt=attempt, trajectory=None) for each, attempt in decided]
    chunks: dict[str, dict[str, span_pb2.SpanChunk]] = {attempt.name: {} for _, attempt in decided}
    if chunks:
        request = span_service_pb2.StreamSpansRequest(parents=list(chunks))
        async for message in client.spans.StreamSpans(request, timeout=SPANS_LIMIT_S):
            for chunk in message.chunks:
                chunks[chunk.attempt][chunk.chunk_id] = chunk
    return [_stored(rollout, attempt, list(chunks[attempt.name].values())) for rollout, attempt in decided]


def deciding_attempt(rollout: rollout_pb2.Rollout) -> attempt_pb2.Attempt | None:
    """Returns the attempt that decided a rollout's final state, or None."""
    return next((each for each in reversed(rollout.attempts) if each.final), None)


async def rollout_names(
    client: Services, request: rollout_service_pb2.ListRolloutsRequest, limit: int | None
) -> AsyncIterator[list[str]]:
    """Yields the names of the rollouts listed by a request, by pages; its page size and token are not used."""
    page_request = rollout_service_pb2.ListRolloutsRequest()
    page_request.CopyFrom(request)
    page_request.ClearField("page_token")
    left = limit
    while left is None or left > 0:
        page_request.page_size = PAGE_SIZE if left is None else min(PAGE_SIZE, left)
        page = await client.rollouts.ListRollouts(page_request, timeout=CALL_LIMIT_S)
        yield [each.name for each in page.rollouts]
        left = None if left is None else left - len(page.rollouts)
        page_request.page_token = page.next_page_token
        if not page.next_page_token:
            return


async def _rollout(client: Services, name: str) -> rollout_pb2.Rollout:
    request = rollout_service_pb2.GetRolloutRequest(name=name)
    return (await client.rollouts.GetRollout(request, timeout=CALL_LIMIT_S)).rollout


def _stored(
    rollout: rollout_pb2.Rollout, attempt: attempt_pb2.Attempt, chunks: Sequence[span_pb2.SpanChunk]
) -> StoredAttempt:
    try:
        return StoredAttempt(rollout=rollout, attempt=attempt, trajectory=trajectory(chunks))
    except ModelCallInvalid as error:
        return StoredAttempt(rollout=rollout, attempt=attempt, trajectory=None, problem=str(error))
