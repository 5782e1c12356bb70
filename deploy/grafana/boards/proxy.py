"""Model calls."""

from __future__ import annotations

from boards.panels import Board, Panel, Row, Variable, percentiles, rate, total

PROXY = Board(
    name="proxy",
    title="LLM proxy",
    description="Model calls: rate, latency, errors, captures.",
    variables=[
        Variable(name="model", metric="fulmen_llm_proxy_calls_total", label="model"),
        Variable(name="backend", metric="fulmen_llm_proxy_backend_in_flight", label="backend"),
    ],
    rows=[
        Row(
            title="Calls",
            panels=[
                Panel(
                    title="Calls by model",
                    unit="reqps",
                    stacked=True,
                    queries={"{{model}}": rate("fulmen_llm_proxy_calls_total", by="model", where='{model=~"$model"}')},
                ),
                Panel(
                    title="Calls by status",
                    unit="reqps",
                    stacked=True,
                    queries={
                        "{{status}}": rate("fulmen_llm_proxy_calls_total", by="status", where='{model=~"$model"}')
                    },
                ),
                Panel(
                    title="Errors by origin and cause",
                    unit="reqps",
                    stacked=True,
                    queries={"{{side}} {{cause}}": rate("fulmen_llm_proxy_errors_total", by="side, cause")},
                ),
                percentiles("To the end of the answer", "fulmen_llm_proxy_call_seconds", where='{model=~"$model"}'),
                percentiles("To the first byte", "fulmen_llm_proxy_first_token_seconds", where='{model=~"$model"}'),
                percentiles(
                    "Between tokens of a stream", "fulmen_llm_proxy_inter_token_seconds", where='{model=~"$model"}'
                ),
                Panel(
                    title="Tokens",
                    queries={
                        "{{kind}} a second": rate("fulmen_llm_proxy_tokens_total", by="kind", where='{model=~"$model"}')
                    },
                ),
                Panel(
                    title="In flight", queries={"{{instance}}": "sum by (instance) (fulmen_llm_proxy_calls_in_flight)"}
                ),
                Panel(
                    title="Cost, dollars per hour",
                    unit="currencyUSD",
                    queries={"{{instance}}": "3600 * " + rate("fulmen_llm_proxy_cost_dollars_total", by="instance")},
                ),
            ],
        ),
        Row(
            title="Backends and routing",
            panels=[
                Panel(
                    title="In flight at backends",
                    stacked=True,
                    queries={
                        "{{backend}}": 'sum by (backend) (fulmen_llm_proxy_backend_in_flight{backend=~"$backend"})'
                    },
                ),
                Panel(
                    title="Waiting",
                    queries={
                        "for {{backend}}": 'sum by (backend) (fulmen_llm_proxy_backend_waiting{backend=~"$backend"})',
                        "within {{backend}}": 'max by (backend) (fulmen_llm_proxy_engine_waiting{backend=~"$backend"})',
                    },
                ),
                Panel(
                    title="Attempts at engines",
                    stacked=True,
                    queries={
                        "{{backend}}": 'sum by (backend) (fulmen_llm_proxy_backend_attempts{backend=~"$backend"})'
                    },
                ),
                Panel(
                    title="Open breakers",
                    maximum=1,
                    queries={
                        "{{backend}} {{state}} {{instance}}": 'fulmen_llm_proxy_backend_breaker{backend=~"$backend", state!="closed"} == 1'
                    },
                ),
                Panel(
                    title="Retries by cause",
                    unit="reqps",
                    stacked=True,
                    queries={"{{cause}}": rate("fulmen_llm_proxy_retries_total", by="cause")},
                ),
                Panel(
                    title="Fallbacks and hedges",
                    unit="reqps",
                    queries={
                        "fallback: {{cause}}": rate("fulmen_llm_proxy_fallbacks_total", by="cause"),
                        "hedge: {{outcome}}": rate("fulmen_llm_proxy_hedges_total", by="outcome"),
                    },
                ),
                Panel(
                    title="Refused",
                    unit="reqps",
                    stacked=True,
                    queries={
                        "no place at a backend": total("fulmen_llm_proxy_backend_queue_refusals_total"),
                        "limit {{limit}} of {{of}}": rate("fulmen_llm_proxy_limit_refusals_total", by="limit, of"),
                        "key {{problem}}": rate("fulmen_llm_proxy_keys_refused_total", by="problem"),
                    },
                ),
                Panel(
                    title="Served policy version",
                    unit="none",
                    minimum=None,
                    queries={
                        "{{policy}} {{model}} {{instance}}": "max by (policy, model, instance) "
                        "(fulmen_llm_proxy_policy_version)"
                    },
                    about="Replicas differ for no longer than a second.",
                ),
                Panel(
                    title="Response cache hit ratio",
                    unit="percentunit",
                    maximum=1,
                    queries={
                        "hits": total('fulmen_llm_proxy_cache_lookups_total{outcome="hit"}')
                        + " / "
                        + total("fulmen_llm_proxy_cache_lookups_total")
                    },
                ),
            ],
        ),
        Row(
            title="Captures",
            panels=[
                Panel(
                    title="Captured calls, usable and not",
                    unit="reqps",
                    stacked=True,
                    queries={"usable: {{usable}}": rate("fulmen_llm_proxy_calls_captured_total", by="usable")},
                ),
                Panel(
                    title="Lost captures by reason",
                    unit="reqps",
                    alarm=0.001,
                    queries={"{{reason}}": rate("fulmen_llm_proxy_captures_dropped_total", by="reason")},
                ),
                Panel(
                    title="Undelivered",
                    unit="bytes",
                    queries={
                        "memory {{instance}}": "sum by (instance) (fulmen_llm_proxy_capture_queue_bytes)",
                        "disk {{instance}}": "sum by (instance) (fulmen_llm_proxy_spool_bytes)",
                    },
                ),
                Panel(
                    title="Calls spooled to disk",
                    unit="reqps",
                    queries={"{{instance}}": rate("fulmen_llm_proxy_captures_spooled_total", by="instance")},
                ),
                Panel(
                    title="Chunks in the spool",
                    queries={"{{instance}}": "sum by (instance) (fulmen_llm_proxy_spool_records)"},
                ),
                Panel(
                    title="Faults",
                    unit="ops",
                    queries={
                        "errors of the disk": total("fulmen_llm_proxy_spool_errors_total"),
                        "calls ended with their attempt": total("fulmen_llm_proxy_calls_of_ended_attempts_total"),
                        "use without an attempt": total("fulmen_llm_proxy_usage_without_attempt_total"),
                    },
                ),
            ],
        ),
    ],
)
