"""Rollouts in a database of which a test knows all fields, and their lists read page by page."""

from __future__ import annotations

import asyncio
import datetime
import random
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import asyncpg

from fulmen.ids import uuid7
from fulmen.store.v1 import attempt_pb2, rollout_pb2
from fulmen_store.database.database import Database
from fulmen_store.projects.names import ProjectNames
from fulmen_store.rollouts.facet_lists import RolloutFacets
from fulmen_store.rollouts.filter import Expression, Field
from fulmen_store.rollouts.lists import RolloutLists
from fulmen_store.rollouts.ordering import Place, SortKey
from fulmen_store.rollouts.transitions import FINAL_STATES, FailureKind, RolloutState
from tests.support.store.filters import (
    AGENTS,
    COUNTS,
    DURATIONS_S,
    GROUPS,
    KEYS,
    MAP_VALUES,
    MAPS,
    MOMENTS,
    REWARDS,
    RUNS,
    TASK_TYPES,
    TEXTS,
    means,
)

__all__ = ["Facts", "FilteredRollouts", "insert_rollouts"]

Facts = dict[Field, Any]


class FilteredRollouts:
    """A database with random rollouts, and what is known of each."""

    def __init__(self, runner: asyncio.Runner, database: Database, facts: dict[UUID, Facts]) -> None:
        self.runner = runner
        self.facts = facts
        self.database = database
        names = ProjectNames(database)
        self.lists = RolloutLists(database, names, window_rows=7)
        self.walking = RolloutLists(database, names, window_rows=7, sorted_at_once=1)
        self.facets = RolloutFacets(database, window_rows=7)

    def all_pages(self, where: Expression | None, *, limit: int = 5, limit_s: float = 60.0) -> list[list[UUID]]:
        """Reads every page."""

        async def read() -> list[list[UUID]]:
            pages, before = [], None
            while True:
                page = await self.lists.page(1, None, where=where, before=before, limit=limit, limit_s=limit_s)
                pages.append([view.rollout_id for view in page.views])
                before = page.next_before
                if before is None:
                    return pages

        return self.runner.run(read())

    def sorted_pages(
        self, where: Expression | None, order: Sequence[SortKey], *, limit: int, walked_at: Sequence[bool] = (False,)
    ) -> list[list[UUID]]:
        """Reads every page in an order, each place as a page token holds it; some are sorted, others walk an index."""

        async def read() -> list[list[UUID]]:
            pages: list[list[UUID]] = []
            after = None
            while True:
                lists = self.walking if walked_at[len(pages) % len(walked_at)] else self.lists
                page = await lists.sorted_page(1, None, where=where, order=order, after=after, limit=limit)
                pages.append([view.rollout_id for view in page.views])
                if page.next_after is None:
                    return pages
                after = Place.decode(page.next_after.encode(), order)

        return self.runner.run(read())

    def in_order(self, where: Expression | None, order: Sequence[SortKey]) -> list[UUID]:
        """Returns what the filter means, in the order: unset fields last, equal rollouts newest first."""
        found = sorted(self.facts if where is None else self.selected(where), reverse=True)
        for key in reversed(order):
            unset = [one for one in found if self.facts[one][key.field] is None]
            rest = [one for one in found if self.facts[one][key.field] is not None]
            found = sorted(rest, key=lambda one: self.facts[one][key.field], reverse=key.descending)
            found += unset
        return found

    def selected(self, where: Expression) -> list[UUID]:
        """Returns what the filter means, newest first."""
        return sorted((key for key, facts in self.facts.items() if means(where, facts)), reverse=True)


async def insert_rollouts(dsn: str, chance: random.Random, count: int) -> dict[UUID, Facts]:
    """Inserts random rollouts; returns what is known of each."""
    connection = await asyncpg.connect(dsn)
    names: dict[str, int | None] = {"": None}
    for kind, texts in ((1, TASK_TYPES), (2, AGENTS)):
        for text in filter(None, texts):
            names[text] = await connection.fetchval(
                "insert into interned_name (project_id, kind, name) values (1, $1, $2) returning id", kind, text
            )
    for text in filter(None, RUNS):
        names[text] = await connection.fetchval(
            "insert into training_run (project_id, name) values (1, $1) returning id", text
        )
    known: dict[UUID, Facts] = {}
    for _ in range(count):
        rollout_id, facts = _random_rollout(chance)
        facts[Field.NAME] = str(rollout_id)
        known[rollout_id] = facts
        await _insert(connection, rollout_id, facts, names)
    await connection.close()
    return known


def _random_rollout(chance: random.Random) -> tuple[UUID, Facts]:
    created = chance.choice(MOMENTS)
    state = chance.choice(list(RolloutState))
    kind = FailureKind.NONE
    if state is RolloutState.FAILED:
        kind = chance.choice([FailureKind.AGENT_ERROR, FailureKind.TIMEOUT, FailureKind.INFRA])
    elif state is RolloutState.CANCELLED:
        kind = FailureKind.CANCELLED
    facts: Facts = {
        Field.STATE: state.value,
        Field.FAILURE_KIND: kind.value,
        Field.MODE: chance.randint(1, 3),
        Field.PRIORITY: chance.randint(-3, 3),
        Field.GROUP_ID: chance.choice(GROUPS),
        Field.TASK_TYPE: chance.choice(TASK_TYPES),
        Field.TRAINING_RUN: chance.choice(RUNS),
        Field.AGENT: chance.choice(AGENTS),
        Field.CREATE_TIME: created,
        Field.END_TIME: chance.choice(MOMENTS) if state in FINAL_STATES else None,
        Field.ENDED_ATTEMPT_COUNT: chance.randint(0, 3),
        Field.REWARD: chance.choice([None, *REWARDS]) if state in FINAL_STATES else None,
        Field.DURATION: chance.choice([None, *DURATIONS_S]) if state in FINAL_STATES else None,
    }
    for field in MAPS:
        facts[field] = {key: chance.choice(MAP_VALUES) for key in chance.sample(KEYS, chance.randint(0, 3))}
    for field in (Field.PROMPT_TOKEN_COUNT, Field.COMPLETION_TOKEN_COUNT, Field.COST_MICROS):
        # Reported together or not at all.
        facts[field] = None if facts[Field.MODE] == 1 else chance.choice(COUNTS)
    facts[Field.TOKEN_COUNT] = (
        None
        if facts[Field.COST_MICROS] is None
        else facts[Field.PROMPT_TOKEN_COUNT] + facts[Field.COMPLETION_TOKEN_COUNT]
    )
    facts[Field.INPUT] = chance.choice([None, *TEXTS[1:]])
    decided = state in FINAL_STATES and facts[Field.ENDED_ATTEMPT_COUNT]
    facts[Field.OUTPUT] = chance.choice([None, *TEXTS[1:]]) if decided else None
    for field in (Field.INPUT, Field.OUTPUT):
        facts[field] = None if facts[field] is None else facts[field].encode()
    # A supplied id may hold a time up to an hour before the creation, or five minutes after it.
    at = created + datetime.timedelta(minutes=chance.uniform(-60, 5))
    return UUID(int=round(at.timestamp() * 1000) << 80 | chance.getrandbits(70)), facts


async def _insert(connection: Any, rollout_id: UUID, facts: Facts, names: dict[str, int | None]) -> None:
    await connection.execute(
        "insert into rollout (id, project_id, sort_priority, mode, group_id, task_type, agent, created_at, request,"
        " run_id) values ($1, 1, $2, $3, nullif($4, ''), $5, $6, $7, $8, $9)",
        rollout_id, -facts[Field.PRIORITY], facts[Field.MODE], facts[Field.GROUP_ID],
        names[facts[Field.TASK_TYPE]], names[facts[Field.AGENT]], facts[Field.CREATE_TIME],
        rollout_pb2.Rollout(
            input=facts[Field.INPUT] or b"", policy={"hedged": True, "model_token_budget": 10**12},
            group_id="refund", **{field: facts[field] for field in MAPS}
        ).SerializeToString(),
        names[facts[Field.TRAINING_RUN]],
    )  # fmt: skip
    state = RolloutState(facts[Field.STATE])
    if state in FINAL_STATES:
        await connection.execute(
            "insert into rollout_end (rollout_id, project_id, group_size, state, failure_kind, ended_at, reward, duration_s)"
            " values ($1, 1, 1, $2, $3, $4, $5, $6)",
            rollout_id, state, facts[Field.FAILURE_KIND], facts[Field.END_TIME], facts[Field.REWARD],
            facts[Field.DURATION],
        )  # fmt: skip
    else:
        session = uuid7() if state is RolloutState.RUNNING else None
        await connection.execute(
            "insert into item (id, project_id, sort_priority, group_size, max_attempts, retry_mask, backoff_ms, timeout_ms, epoch,"
            " session, leased_at, run_at) values ($1, 1, 0, 1, 3, 0, 0, 1000, $2, $3::uuid, case when $3::uuid is null then null else"
            " now() end, now() + $4 * interval '1 hour')",
            rollout_id, 0 if state is RolloutState.QUEUED else 1, session, int(state is RolloutState.RETRY_WAIT),
        )  # fmt: skip
    if facts[Field.COST_MICROS] is not None:
        await connection.execute(
            "insert into rollout_usage values ($1, 1, null, $2, $3, default, $4)",
            rollout_id, facts[Field.PROMPT_TOKEN_COUNT], facts[Field.COMPLETION_TOKEN_COUNT], facts[Field.COST_MICROS],
        )  # fmt: skip
    for number in range(1, facts[Field.ENDED_ATTEMPT_COUNT] + 1):
        decides = state in FINAL_STATES and number == facts[Field.ENDED_ATTEMPT_COUNT]
        answer = facts[Field.OUTPUT] if decides else b"refund of another attempt"
        await connection.execute(
            "insert into attempt (rollout_id, number, state, failure_kind, rollout_state, session, started_at, report)"
            " values ($1, $2, 3, 4, $5, $3, now(), $4)",
            rollout_id, number, uuid7(), attempt_pb2.Attempt(output=answer or b"", failure_message="refund").SerializeToString(),
            6 if decides else 3,
        )  # fmt: skip
