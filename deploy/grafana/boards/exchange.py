"""Compressed gradients."""

from __future__ import annotations

from boards.panels import RATE, Board, Panel, Row, Variable, percentiles, rate, run_metrics

SHARD = "{{run}}/{{shard}}"
OF_RUN = '{run=~"$run"}'
EXCHANGE = Board(
    name="exchange",
    title="exchange of gradients",
    description="Ranks that exchange compressed gradients through servers, by shard.",
    variables=[Variable(name="run", metric="fulmen_algorithm_exchange_round", label="run")],
    rows=[
        Row(
            title="Members and rounds",
            panels=[
                Panel(
                    title="Members, ratio of the start",
                    queries={
                        SHARD: f"fulmen_algorithm_exchange_members{OF_RUN}",
                        f"{SHARD} at first": f"fulmen_algorithm_exchange_world_size{OF_RUN}",
                    },
                ),
                Panel(
                    title="Rounds",
                    unit="ops",
                    queries={SHARD: f"rate(fulmen_algorithm_exchange_round_seconds_count{OF_RUN}{RATE})"},
                ),
                percentiles("Duration of a round", "fulmen_algorithm_exchange_round_seconds", by="run", where=OF_RUN),
                Panel(
                    title="Round and epoch",
                    queries={
                        f"round {SHARD}": f"fulmen_algorithm_exchange_round{OF_RUN}",
                        f"epoch {SHARD}": f"fulmen_algorithm_exchange_epoch{OF_RUN}",
                    },
                ),
                Panel(
                    title="Sums, and those with a quorum only",
                    unit="ops",
                    queries={
                        "sums {{run}}": rate("fulmen_algorithm_exchange_sums_total", by="run", where=OF_RUN),
                        "partial {{run}}": rate("fulmen_algorithm_exchange_partial_sums_total", by="run", where=OF_RUN),
                    },
                ),
                Panel(
                    title="Losses of the exchange",
                    queries={
                        f"members removed {SHARD}": f"fulmen_algorithm_exchange_removed_members_total{OF_RUN}",
                        f"residuals lost {SHARD}": f"fulmen_algorithm_exchange_lost_residuals_total{OF_RUN}",
                    },
                ),
            ],
        ),
        Row(
            title="Bytes and payloads",
            panels=[
                Panel(
                    title="Bytes sent",
                    unit="Bps",
                    queries={
                        "received {{run}}": rate(
                            "fulmen_algorithm_exchange_received_bytes_total", by="run", where=OF_RUN
                        ),
                        "sent {{run}}": rate("fulmen_algorithm_exchange_sent_bytes_total", by="run", where=OF_RUN),
                    },
                ),
                Panel(
                    title="Compression ratio of payloads",
                    queries={
                        "{{run}}": rate("fulmen_algorithm_exchange_raw_bytes_total", by="run", where=OF_RUN)
                        + " / "
                        + rate("fulmen_algorithm_exchange_received_bytes_total", by="run", where=OF_RUN)
                    },
                ),
                Panel(
                    title="Payloads by status",
                    unit="ops",
                    stacked=True,
                    queries={"{{status}}": rate("fulmen_algorithm_exchange_payloads_total", by="status", where=OF_RUN)},
                ),
            ],
        ),
        Row(
            title="Seen by the ranks",
            panels=[
                run_metrics("Time of a step's exchange", "exchange_(wait|encode|transfer|decode)_seconds", unit="s"),
                run_metrics("Ratio", "exchange_ratio"),
                run_metrics(
                    "What compression leaves out",
                    "exchange_(gradient_cosine|relative_error|residual_norm)",
                    minimum=None,
                ),
            ],
        ),
    ],
)
