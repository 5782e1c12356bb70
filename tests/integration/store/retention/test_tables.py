"""Every table that grows has a retention, and deletes in batches."""

from __future__ import annotations

import re
from typing import Any

from fulmen_store.database.queries import SQL

# The statements that remove rows of a table as they age or are no longer needed.
REMOVED_BY = {
    "annotation": ["remove_annotations"],
    "attempt": ["remove_attempts"],
    "audit_entry": ["delete_old_audit_entries", "delete_surplus_audit_entries"],
    "capture_account": ["delete_old_accounts"],
    "conversation": ["settle_conversations"],
    "effect": ["remove_effects"],
    "interned_name": ["remove_names"],
    "item": ["end_attempts", "end_hedged_attempts", "cancel_rollouts", "fail_overdue_rollouts"],
    "issued_token": ["delete_expired_tokens"],
    "lost_runner": ["delete_old_lost_runners"],
    "proxy": ["delete_old_proxies"],
    "recorded_call": ["remove_expired_calls", "remove_oldest_calls"],
    "replica": ["renew_replica"],
    "request_log": ["delete_expired_requests"],
    "resource_use": ["delete_ended_uses"],
    "resource_version": ["remove_versions"],
    "rollout": ["remove_rollouts"],
    "rollout_end": ["remove_ends"],
    "rollout_group": ["remove_groups"],
    "rollout_retry": ["remove_retries"],
    "rollout_usage": ["remove_rollout_usage"],
    "run_lease": ["remove_expired_runs"],
    "runner_session": ["delete_ended_sessions"],
    "stored_response": ["remove_expired_stored_responses", "remove_oldest_stored_responses"],
    "schedule_run": ["remove_old_schedule_runs"],
    "span_chunk": ["drop_expired_partition", "remove_chunks"],
    "span_extent": ["remove_extents"],
    "span_segment": ["forget_segments"],
    "training_run": ["remove_runs"],
    "usage_attempt": ["delete_usage_attempts"],
    "usage_instance": ["delete_usage_instances"],
    "usage_minute": ["delete_usage_minutes"],
    "usage_window": ["delete_windows"],
}
BOUNDED = {
    "budget_spend": "one row per budget that a project has had",
    "run_event": "goes with its run (on delete cascade)",
    "live_count": "one row per kind of live rollouts, and as many new ones at most before they are folded (fold_counts)",
    "project": "administrators create projects",
    "recorded_size": "one row per project",
    "resource": "one row per name; its versions are what grows, and they have a ttl",
    "resource_alias": "at most as many as clients name, one row each; a move changes the row",
    "resource_alias_move": "goes with the version that the alias was moved to (on delete cascade)",
    "resource_dependency": "at most 32 per version, and goes with it (on delete cascade)",
    "schedule": "a project has a maximum of schedules",
    "schema_migration": "one row per migration of this version",
    "secret": "a project has a maximum of secrets",
    "stored_response_size": "one row per project",
    "task_duration": "some hundred buckets per task type; goes with its name (on delete cascade)",
}
# What deletes by keys that the caller has counted, or one row per statement.
BY_KEYS = re.compile(r"= any \(\$\d::\w+\[\]\)|using k where|from unnest\(")


async def test_a_table_has_a_retention_or_a_reason_to_have_none(connection: Any) -> None:
    rows = await connection.fetch(
        "select relname from pg_class where relnamespace = 'public'::regnamespace and relkind in ('r', 'p')"
        " and not relispartition"
    )
    tables = {row["relname"] for row in rows}
    assert len(tables) > 25
    assert tables == REMOVED_BY.keys() | BOUNDED.keys()
    assert not REMOVED_BY.keys() & BOUNDED.keys()


def test_what_removes_rows_deletes_from_the_table_and_so_many_at_most() -> None:
    for table, names in REMOVED_BY.items():
        for name in names:
            if name == "drop_expired_partition":
                continue
            statement = SQL[name]
            assert re.search(rf"delete from {table}\b", statement), name
            assert re.search(r"limit (\$\d|\d+)", statement) or BY_KEYS.search(statement), name


async def test_what_goes_with_other_rows_is_deleted_by_the_database(connection: Any) -> None:
    rows = await connection.fetch(
        "select conrelid::regclass::text as name from pg_constraint where contype = 'f' and confdeltype = 'c'"
    )
    cascading = {table for table, reason in BOUNDED.items() if "on delete cascade" in reason}
    assert cascading <= {row["name"] for row in rows}
