"""Everything of the store that reads and writes PostgreSQL, put together."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from fulmen_store.database.database import Database, connect
from fulmen_store.database.migrations import migrate
from fulmen_store.leases.table import AttemptCheckTable, OverdueTable, PgLeaseTable, SessionTable
from fulmen_store.projects.table import ProjectTable, TokenTable
from fulmen_store.replicas.table import ReplicaTable
from fulmen_store.resources.garbage_table import GarbageTable
from fulmen_store.resources.table import ResourceTable
from fulmen_store.retention.table import UpkeepTable
from fulmen_store.rollouts.dead_letters_table import DeadLetterTable
from fulmen_store.rollouts.lists import RolloutLists
from fulmen_store.rollouts.table import FeedTable, RolloutTable
from fulmen_store.runners.table import RunnerTable
from fulmen_store.scheduling.table import DemandTable, DurationTable, QueueStatsTable
from fulmen_store.settings import StoreSettings
from fulmen_store.usage.table import UsageTable

__all__ = ["Tables", "open_tables"]

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Everything that reads and writes PostgreSQL."""

    database: Database
    rollouts: RolloutTable
    rollout_lists: RolloutLists
    dead_letters: DeadLetterTable
    leases: PgLeaseTable
    attempt_checks: AttemptCheckTable
    queue_stats: QueueStatsTable
    durations: DurationTable
    demand: DemandTable
    sessions: SessionTable
    runners: RunnerTable
    overdue: OverdueTable
    feed: FeedTable
    resources: ResourceTable
    garbage: GarbageTable
    upkeep: UpkeepTable
    projects: ProjectTable
    tokens: TokenTable
    replicas: ReplicaTable
    usage: UsageTable


async def open_tables(settings: StoreSettings, stack: AsyncExitStack) -> Tables:
    """Connects to PostgreSQL and brings the schema up to date.

    Raises:
        DatabaseUnavailable: if it did not answer in time.
        MigrationError: if the schema cannot be brought up to date.
    """
    dsn = settings.database_url.get_secret_value()
    database = await connect(
        dsn, connections=settings.database_connections, start_limit_s=settings.database_start_limit_s
    )
    stack.push_async_callback(database.close)
    if settings.auto_migrate:
        migrated = await migrate(dsn)
        _log.info(
            "schema_ready", applied=migrated.applied, waiting_for_post=migrated.waiting, caught_up=migrated.caught_up
        )
    return Tables(
        database=database,
        rollouts=RolloutTable(database),
        rollout_lists=RolloutLists(database),
        dead_letters=DeadLetterTable(database),
        leases=PgLeaseTable(database),
        attempt_checks=AttemptCheckTable(database),
        queue_stats=QueueStatsTable(database),
        durations=DurationTable(database),
        demand=DemandTable(database),
        sessions=SessionTable(database),
        runners=RunnerTable(database),
        overdue=OverdueTable(database),
        feed=FeedTable(database),
        resources=ResourceTable(database),
        garbage=GarbageTable(database),
        upkeep=UpkeepTable(database),
        projects=ProjectTable(database),
        tokens=TokenTable(database),
        replicas=ReplicaTable(database),
        usage=UsageTable(database),
    )
