"""What is looked at first."""

from __future__ import annotations

from boards.panels import RATE, SERVICES, WAITING, Board, Panel, Row, met, number, rate, total

OVERVIEW = Board(
    name="overview",
    title="overview",
    description="Health, throughput and resources of the deployment.",
    rows=[
        Row(
            title="Health",
            panels=[
                number(
                    "Alerts that fire",
                    'count(ALERTS{alertname=~"Fulmen.*", alertstate="firing"}) or vector(0)',
                    alarm=1,
                ),
                number("Processes that do not answer", f"count(up{{{SERVICES}}} == 0) or vector(0)", alarm=1),
                number("Stores without a database", "count(fulmen_store_database_up == 0) or vector(0)", alarm=1),
                number(
                    "Backends given up",
                    'sum(max by (backend) (fulmen_llm_proxy_backend_breaker{state="open"}))',
                    alarm=1,
                ),
                number("Rollouts waiting", f"sum({WAITING})"),
                number("Attempts running", "sum(fulmen_runner_running)"),
                number("Runners", "sum(fulmen_store_runners)", alarm=1, alarm_below=True),
                number("Training runs", 'sum(fulmen_algorithm_runs{state="running"})'),
            ],
        ),
        Row(
            title="Work",
            panels=[
                Panel(
                    title="Ended attempts by failure kind",
                    unit="ops",
                    stacked=True,
                    queries={"{{failure_kind}}": rate("fulmen_runner_attempts_total", by="failure_kind")},
                    about="`none` are successes. INFRA is retried and never becomes a reward.",
                ),
                Panel(
                    title="Model calls, by status",
                    unit="reqps",
                    stacked=True,
                    queries={"{{status}}": rate("fulmen_llm_proxy_calls_total", by="status")},
                    about="0: the caller had disconnected.",
                ),
                Panel(
                    title="Tokens",
                    unit="short",
                    queries={"{{kind}} a second": rate("fulmen_llm_proxy_tokens_total", by="kind")},
                ),
                Panel(
                    title="Queue",
                    queries={
                        "waiting": f"sum({WAITING})",
                        "running": "sum(max by (project, labels) (fulmen_store_demand_running))",
                        "free places": "sum(fulmen_store_queue_open_credit)",
                    },
                ),
                Panel(
                    title="Reward of training runs",
                    minimum=None,
                    queries={"{{run}}": 'fulmen_algorithm_run_metric{metric="reward_mean"}'},
                ),
                Panel(
                    title="Cost of model calls, dollars per hour",
                    unit="currencyUSD",
                    queries={"cost": "3600 * " + total("fulmen_llm_proxy_cost_dollars_total")},
                    about="By the price table of the proxy; a model without a price costs nothing.",
                ),
            ],
        ),
        Row(
            title="Service objectives",
            panels=[
                met(
                    "Rpcs without a fault of ours",
                    "rpc_server_duration_seconds_count",
                    missed='{rpc_code=~"INTERNAL|UNKNOWN"}',
                ),
                met(
                    "Attempts not lost to infrastructure",
                    "fulmen_runner_attempts_total",
                    missed='{failure_kind="INFRA"}',
                ),
                met(
                    "Model calls without a failure of backends",
                    "fulmen_llm_proxy_calls_total",
                    missed='{status=~"5.."}',
                ),
                Panel(
                    title="Attempts delivered within 100 ms of their match",
                    unit="percentunit",
                    maximum=1,
                    alarm=0.99,
                    alarm_below=True,
                    queries={
                        "ratio": f'sum(rate(fulmen_store_dispatch_duration_seconds_bucket{{le="0.1"}}{RATE})) / '
                        + total("fulmen_store_dispatch_duration_seconds_count")
                    },
                ),
                Panel(
                    title="Cost of model calls per attempt, dollars",
                    unit="currencyUSD",
                    queries={
                        "cost": total("fulmen_llm_proxy_cost_dollars_total")
                        + " / "
                        + total("fulmen_store_dispatched_total")
                    },
                    about="Dispatched attempts, whatever their outcome.",
                ),
            ],
        ),
        Row(
            title="Services",
            panels=[
                Panel(
                    title="Cores in use",
                    queries={"{{job}} {{instance}}": f"rate(process_cpu_seconds_total{{{SERVICES}}}{RATE})"},
                    about="A process of the store, proxy or runner uses at most one core: near 1 it needs another replica or worker.",
                ),
                Panel(
                    title="Memory",
                    unit="bytes",
                    queries={"{{job}} {{instance}}": f"process_resident_memory_bytes{{{SERVICES}}}"},
                ),
                Panel(
                    title="Open files, ratio of the limit",
                    unit="percentunit",
                    alarm=0.8,
                    queries={"{{job}} {{instance}}": f"process_open_fds{{{SERVICES}}} / process_max_fds"},
                ),
                Panel(
                    title="Rpcs",
                    unit="reqps",
                    stacked=True,
                    queries={"{{job}}": rate("rpc_server_duration_seconds_count", by="job")},
                ),
                Panel(
                    title="Failed rpcs by code",
                    unit="reqps",
                    stacked=True,
                    queries={
                        "{{job}} {{rpc_code}}": rate(
                            "rpc_server_duration_seconds_count", by="job, rpc_code", where='{rpc_code!~"OK|CANCELLED"}'
                        ),
                    },
                    about="INTERNAL and UNKNOWN are faults of the services; other codes are caused by callers.",
                ),
                Panel(
                    title="Process starts, last hour",
                    kind="timeseries",
                    queries={"{{job}} {{instance}}": f"changes(process_start_time_seconds{{{SERVICES}}}[1h])"},
                ),
            ],
        ),
    ],
)
