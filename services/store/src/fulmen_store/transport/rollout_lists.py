"""Lists and counts of rollouts: requests decoded, answers encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from google.protobuf.duration_pb2 import Duration

from fulmen.errors import Violation
from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import rollout_selection_pb2 as selection_pb
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_service_kit.rpc.message_sizes import fitting
from fulmen_store.malformed import malformed, malformed_request, noted
from fulmen_store.rollouts.facet_lists import RolloutFacets
from fulmen_store.rollouts.facets import FACETED_FIELDS
from fulmen_store.rollouts.filter import Expression, Field, both, states_filter
from fulmen_store.rollouts.filter_parser import parse_filter
from fulmen_store.rollouts.lists import RolloutLists
from fulmen_store.rollouts.ordering import Place, SortKey, parse_order
from fulmen_store.rollouts.windows import MAX_LIMIT_S
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size
from fulmen_store.transport.wire.rollouts import counts_message, rollout_of

__all__ = ["CountRequest", "ListRequest", "ListRequests", "Scope"]

DEFAULT_PAGE: Final = 50
ID_BYTES: Final = 16
MAX_SHOWN: Final = 40

Scope = tuple[int, int | None]
"""Numbers of a project and of a training run; no run if none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListRequest:
    """A decoded request for a list.

    Attributes:
        where: Its filter.
        order: Its order; empty: newest first.
        limit: Rollouts of a page, at most.
        limit_s: How long to look for them, seconds.
        listed: What its page tokens are bound to.
        last: The key in its page token; None for the first page.
    """

    where: Expression | None
    order: Sequence[SortKey]
    limit: int
    limit_s: float
    listed: str
    last: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountRequest:
    """A decoded request for a count: its filter, the fields to count the values of, and how long to count, seconds."""

    where: Expression | None
    fields: Sequence[Field]
    limit_s: float


class ListRequests:
    """Answers `ListRollouts` and `CountRollouts`."""

    def __init__(self, *, lists: RolloutLists, facets: RolloutFacets) -> None:
        self._lists = lists
        self._facets = facets

    @staticmethod
    def checked(request: pb.ListRolloutsRequest, *, project: str) -> ListRequest:
        """Decodes a request for a list.

        Raises:
            ArgumentInvalid: With every problem.
            PageTokenInvalid: If the page token is not one of this list.
        """
        problems: list[Violation] = []
        where: Expression | None = None
        order: Sequence[SortKey] = ()
        limit, limit_s = DEFAULT_PAGE, MAX_LIMIT_S
        with noted(problems):
            where = both(states_filter(frozenset(request.states)), parse_filter(request.filter))
        with noted(problems):
            order = parse_order(request.order_by)
        with noted(problems):
            limit = page_size(request.page_size, default=DEFAULT_PAGE)
        with noted(problems):
            limit_s = _limit_s(request.time_limit)
        if problems:
            raise malformed_request(problems)
        listed = f"rollouts/{project}/{request.training_run}/{sorted(request.states)}/{request.filter}"
        if order:
            listed += f"/{request.order_by}"
        last = decode_token(request.page_token, listed=listed, key_bytes=None if order else ID_BYTES)
        return ListRequest(where=where, order=order, limit=limit, limit_s=limit_s, listed=listed, last=last)

    async def list(self, asked: ListRequest, scope: Scope) -> pb.ListRolloutsResponse:
        """Returns a page."""
        return await (self._ordered(asked, scope) if asked.order else self._newest(asked, scope))

    @staticmethod
    def checked_count(request: selection_pb.CountRolloutsRequest) -> CountRequest:
        """Decodes a request for a count.

        Raises:
            ArgumentInvalid: With every problem.
        """
        problems: list[Violation] = []
        where: Expression | None = None
        fields: list[Field] = []
        limit_s = MAX_LIMIT_S
        with noted(problems):
            where = both(states_filter(frozenset(request.states)), parse_filter(request.filter))
        with noted(problems):
            fields = _faceted(request.facets)
        with noted(problems):
            limit_s = _limit_s(request.time_limit)
        if problems:
            raise malformed_request(problems)
        return CountRequest(where=where, fields=fields, limit_s=limit_s)

    async def count(self, asked: CountRequest, scope: Scope) -> selection_pb.CountRolloutsResponse:
        """Counts rollouts, and beside that the values of fields."""
        counting = self._lists.count(*scope, where=asked.where, limit_s=asked.limit_s)
        if not asked.fields:
            return counts_message(await counting)
        faceting = self._facets.facets(*scope, where=asked.where, fields=asked.fields, limit_s=asked.limit_s)
        return counts_message(*await asyncio.gather(counting, faceting))

    async def _newest(self, asked: ListRequest, scope: Scope) -> pb.ListRolloutsResponse:
        before = None if asked.last is None else UUID(bytes=asked.last)
        page = await self._lists.page(
            *scope, where=asked.where, before=before, limit=asked.limit, limit_s=asked.limit_s
        )
        shown = fitting(rollout_of(view, with_input=False) for view in page.views)
        before = page.next_before if len(shown) == len(page.views) else page.views[len(shown) - 1].rollout_id
        response = _page(shown, None if before is None else before.bytes, asked.listed)
        if before is not None and len(page.views) < asked.limit:
            response.looked_back_to_time.FromMilliseconds(before.int >> 80)
        return response

    async def _ordered(self, asked: ListRequest, scope: Scope) -> pb.ListRolloutsResponse:
        after = None if asked.last is None else Place.decode(asked.last, asked.order)
        page = await self._lists.sorted_page(
            *scope, where=asked.where, order=asked.order, after=after, limit=asked.limit, limit_s=asked.limit_s
        )
        shown = fitting(rollout_of(view, with_input=False) for view in page.views)
        after = page.next_after if len(shown) == len(page.views) else Place.of(page.views[len(shown) - 1], asked.order)
        return _page(shown, None if after is None else after.encode(), asked.listed)


def _page(shown: Sequence[rollout_pb2.Rollout], key: bytes | None, listed: str) -> pb.ListRolloutsResponse:
    return pb.ListRolloutsResponse(
        rollouts=shown, next_page_token="" if key is None else encode_token(key, listed=listed)
    )


def _limit_s(limit: Duration) -> float:
    """Returns a time limit, seconds.

    Raises:
        ArgumentInvalid: If it is out of range.
    """
    if limit == Duration():
        return MAX_LIMIT_S
    limit_s = limit.seconds + limit.nanos / 1e9
    if not 0 < limit_s <= MAX_LIMIT_S:
        raise malformed("time_limit", f"is {limit_s:g} s, must be greater than 0 s and at most {MAX_LIMIT_S:g} s")
    return limit_s


def _faceted(names: Sequence[str]) -> list[Field]:
    """Returns the fields of facets.

    Raises:
        ArgumentInvalid: With every name that is none, or that is given twice.
    """
    problems = []
    for place, name in enumerate(names):
        if name not in FACETED_FIELDS:
            text = f"`{name[:MAX_SHOWN]}` is not one of {', '.join(FACETED_FIELDS)}"
            problems.append(Violation(field="facets", description=text))
        elif name in names[:place]:
            problems.append(Violation(field="facets", description=f"{name} is named twice"))
    if problems:
        raise malformed_request(problems)
    return [Field(name) for name in names]
