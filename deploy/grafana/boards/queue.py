"""The queue, runners and their agents, the store and its database."""

from __future__ import annotations

from boards.panels import RATE, WAITING, Board, Panel, Row, Variable, percentiles, rate, total

QUEUE = Board(
    name="queue",
    title="queue, runners and agents",
    description="Queued and running rollouts, dispatch, outcomes.",
    variables=[Variable(name="project", metric="fulmen_store_demand_queued", label="project")],
    rows=[
        Row(
            title="The queue",
            panels=[
                Panel(
                    title="Queued by project and labels",
                    stacked=True,
                    queries={
                        "{{project}} {{labels}}": "max by (project, labels) "
                        '(fulmen_store_demand_queued{project=~"$project"})'
                    },
                    about="Counted every 15 s.",
                ),
                Panel(
                    title="Running by project and labels",
                    stacked=True,
                    queries={
                        "{{project}} {{labels}}": "max by (project, labels) "
                        '(fulmen_store_demand_running{project=~"$project"})'
                    },
                ),
                Panel(
                    title="Predicted work of the queue",
                    unit="s",
                    queries={
                        "{{project}}": "sum by (project) (max by (project, labels) "
                        '(fulmen_store_demand_predicted_work_seconds{project=~"$project"}))'
                    },
                ),
                Panel(
                    title="Attempts dispatched",
                    unit="ops",
                    queries={"{{instance}}": rate("fulmen_store_dispatched_total", by="instance")},
                ),
                percentiles("From match to delivery", "fulmen_store_dispatch_duration_seconds"),
                Panel(
                    title="Wait of a new rollout at this pace",
                    unit="s",
                    queries={"all projects": f"sum({WAITING}) / " + total("fulmen_store_dispatched_total")},
                    about="Waiting rollouts divided by dispatched attempts per second.",
                ),
                Panel(
                    title="Claims lost to another replica",
                    unit="ops",
                    queries={"{{instance}}": rate("fulmen_store_claims_lost_total", by="instance")},
                ),
            ],
        ),
        Row(
            title="Schedules and forecasts",
            panels=[
                Panel(
                    title="Due times of schedules, last hour",
                    stacked=True,
                    queries={"{{outcome}}": "sum by (outcome) (increase(fulmen_store_schedule_runs_total[1h]))"},
                    about="`fulmen schedule show` shows why one failed.",
                ),
                percentiles("From the due time to the rollouts", "fulmen_store_schedule_delay_seconds"),
                Panel(
                    title="Error of the forecasts of the demand",
                    unit="percentunit",
                    queries={
                        "{{method}}": "sum by (method) (increase(fulmen_store_demand_forecast_errors_total[1h])) "
                        "/ scalar(sum(increase(fulmen_store_demand_forecast_compared_total[1h])))"
                    },
                    about="Over the last hour, if forecasts are requested. The forecast is used while holt is below naive.",
                ),
            ],
        ),
        Row(
            title="Runners",
            panels=[
                Panel(title="Runners by store replica", stacked=True, queries={"{{instance}}": "fulmen_store_runners"}),
                Panel(
                    title="Slots",
                    queries={
                        "all": "sum(fulmen_runner_slots)",
                        "taken": "sum(fulmen_runner_running)",
                        "free, as the store knows": "sum(fulmen_store_queue_open_credit)",
                        "of runners that drain": "sum(fulmen_runner_slots * fulmen_runner_draining)",
                    },
                ),
                Panel(
                    title="Ended attempts by failure kind",
                    unit="ops",
                    stacked=True,
                    queries={"{{failure_kind}}": rate("fulmen_runner_attempts_total", by="failure_kind")},
                ),
                Panel(
                    title="Slot changes by reason",
                    unit="ops",
                    queries={"{{reason}}": rate("fulmen_runner_slot_changes_total", by="reason")},
                    about="Only runners with automatic slots.",
                ),
                Panel(
                    title="Stuck attempts and agents",
                    queries={
                        "stragglers {{instance}}": "fulmen_runner_stragglers",
                        "reports not acknowledged {{instance}}": "fulmen_runner_unacknowledged",
                    },
                ),
                Panel(
                    title="Time in which agents block their runner",
                    unit="percentunit",
                    alarm=0.2,
                    queries={"{{instance}}": f"rate(fulmen_runner_loop_blocked_seconds_total{RATE})"},
                ),
            ],
        ),
        Row(
            title="Agents (with the hook fulmen_runner.hooks.monitor:Monitor)",
            panels=[
                Panel(
                    title="Failure ratio of attempts",
                    unit="percentunit",
                    maximum=1,
                    queries={
                        "{{agent}}": "sum by (agent) "
                        '(rate(fulmen_agent_attempts_total{failure_kind!="none"}[$__rate_interval])) '
                        "/ " + rate("fulmen_agent_attempts_total", by="agent")
                    },
                ),
                percentiles("Duration of attempts", "fulmen_agent_duration_seconds", by="agent"),
                Panel(
                    title="Mean reward",
                    minimum=None,
                    queries={
                        "{{agent}} {{mode}} {{dimension}}": "delta(fulmen_agent_reward_sum[15m]) / "
                        "(delta(fulmen_agent_reward_count[15m]) != 0)"
                    },
                    about="Over fifteen minutes. Not with increase(): negative rewards decrease the sum, which increase() would take for a restart.",
                ),
                Panel(
                    title="Mean reward, last five minutes",
                    minimum=None,
                    queries={"{{agent}} {{instance}}": "fulmen_agent_rolling_mean_reward"},
                ),
                Panel(
                    title="Model calls",
                    unit="reqps",
                    queries={"{{agent}}": rate("fulmen_agent_model_calls_total", by="agent")},
                ),
                Panel(
                    title="Tokens",
                    queries={"{{agent}} {{kind}} a second": rate("fulmen_agent_tokens_total", by="agent, kind")},
                ),
                Panel(
                    title="Failed hook calls",
                    unit="ops",
                    queries={"{{hook}} {{point}}": rate("fulmen_runner_hook_failures_total", by="hook, point")},
                ),
            ],
        ),
        Row(
            title="Store and database",
            panels=[
                Panel(
                    title="Commits by kind",
                    unit="ops",
                    stacked=True,
                    queries={"{{work}}": rate("fulmen_store_commit_rows_count", by="work")},
                ),
                Panel(
                    title="Rows in a commit, mean",
                    queries={
                        "{{work}}": rate("fulmen_store_commit_rows_sum", by="work")
                        + " / "
                        + rate("fulmen_store_commit_rows_count", by="work")
                    },
                ),
                Panel(
                    title="Lag of the feed",
                    unit="s",
                    alarm=30,
                    queries={"{{instance}}": "fulmen_store_feed_lag_seconds"},
                    about="How long ended rollouts are hidden by an older transaction of PostgreSQL's server.",
                ),
                Panel(
                    title="Spans rejected or repeated, unreadable chunks",
                    unit="ops",
                    queries={
                        "rejected": total("fulmen_store_spans_rejected_total"),
                        "repeated": total("fulmen_store_spans_repeated_total"),
                        "unreadable chunks": total("fulmen_store_chunks_unreadable_total"),
                        "unreadable messages": total("fulmen_store_columns_unreadable_total"),
                    },
                ),
                Panel(
                    title="Spans moved into object storage",
                    unit="Bps",
                    queries={"moved": total("fulmen_store_segments_bytes_total")},
                    about="Spans of ended rollouts, into segments; every ten minutes with FULMEN_STORE_BLOB_URL.",
                ),
                Panel(
                    title="Connections of PostgreSQL",
                    queries={
                        "{{datname}} {{state}}": "sum by (datname, state) (pg_stat_activity_count)",
                        "limit": "max(pg_settings_max_connections)",
                    },
                ),
                Panel(
                    title="Transactions",
                    unit="ops",
                    queries={
                        "committed": total("pg_stat_database_xact_commit"),
                        "rolled back": total("pg_stat_database_xact_rollback"),
                    },
                ),
                Panel(title="Size of databases", unit="bytes", queries={"{{datname}}": "pg_database_size_bytes"}),
            ],
        ),
    ],
)
