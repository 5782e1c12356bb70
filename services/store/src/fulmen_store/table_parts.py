"""Everything of the store that reads and writes PostgreSQL, put together."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

import structlog

from fulmen_store.database.database import Database, connect
from fulmen_store.database.migrations import migrate
from fulmen_store.leases.attempt_checks_table import PgAttemptChecks
from fulmen_store.leases.overdue_table import PgOverdue
from fulmen_store.leases.table import PgFeed, PgLeases, PgSessions, PgUpkeep
from fulmen_store.projects.table import PgProjects, PgTokens
from fulmen_store.replicas.table import PgReplicas
from fulmen_store.resources.garbage_table import PgGarbage
from fulmen_store.resources.table import PgResources
from fulmen_store.rollouts.dead_letters_table import PgDeadLetters
from fulmen_store.rollouts.lists import PgRolloutLists
from fulmen_store.rollouts.table import PgRollouts
from fulmen_store.runners.table import PgRunners
from fulmen_store.scheduling.table import PgDemand, PgDurations, PgQueueStats
from fulmen_store.settings import StoreSettings
from fulmen_store.usage.table import PgUsage

__all__ = ["Tables", "open_tables"]

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Everything that reads and writes PostgreSQL."""

    database: Database
    rollouts: PgRollouts
    rollout_lists: PgRolloutLists
    dead_letters: PgDeadLetters
    leases: PgLeases
    attempt_checks: PgAttemptChecks
    queue_stats: PgQueueStats
    durations: PgDurations
    demand: PgDemand
    sessions: PgSessions
    runners: PgRunners
    overdue: PgOverdue
    feed: PgFeed
    resources: PgResources
    garbage: PgGarbage
    upkeep: PgUpkeep
    projects: PgProjects
    tokens: PgTokens
    replicas: PgReplicas
    usage: PgUsage


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
        rollouts=PgRollouts(database),
        rollout_lists=PgRolloutLists(database),
        dead_letters=PgDeadLetters(database),
        leases=PgLeases(database),
        attempt_checks=PgAttemptChecks(database),
        queue_stats=PgQueueStats(database),
        durations=PgDurations(database),
        demand=PgDemand(database),
        sessions=PgSessions(database),
        runners=PgRunners(database),
        overdue=PgOverdue(database),
        feed=PgFeed(database),
        resources=PgResources(database),
        garbage=PgGarbage(database),
        upkeep=PgUpkeep(database),
        projects=PgProjects(database),
        tokens=PgTokens(database),
        replicas=PgReplicas(database),
        usage=PgUsage(database),
    )
