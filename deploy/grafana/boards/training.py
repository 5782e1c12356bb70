"""What runs learn."""

from __future__ import annotations

from boards.panels import Board, Panel, Row, Variable, run_metrics

TRAINING = Board(
    name="training",
    title="training runs",
    description="Progress and learning of runs, agreement of sampler and trainer. docs/metrics.md lists every metric.",
    variables=[Variable(name="run", metric="fulmen_algorithm_run_step", label="run")],
    span="6h",
    rows=[
        Row(
            title="Progress",
            panels=[
                Panel(
                    title="Runs by state", stacked=True, queries={"{{state}}": "sum by (state) (fulmen_algorithm_runs)"}
                ),
                Panel(
                    title="Steps, done and planned",
                    unit="percentunit",
                    maximum=1,
                    queries={"{{run}}": 'fulmen_algorithm_run_step{run=~"$run"} / fulmen_algorithm_run_steps_planned'},
                ),
                run_metrics("Time left", "eta_seconds", unit="s"),
            ],
        ),
        Row(
            title="Learning",
            panels=[
                run_metrics("Reward, as sampled", "reward_mean", minimum=None),
                run_metrics("Validation", "validation_accuracy", minimum=None),
                run_metrics("Loss", "loss", minimum=None),
                run_metrics("Norm of the gradient, before clipping", "grad_norm"),
                run_metrics(
                    "Entropy", "entropy_estimate", minimum=None, about="Falls to almost 0 if a policy collapses."
                ),
                run_metrics("Learning rate", "learning_rate", unit="sci"),
            ],
        ),
        Row(
            title="Sampler and trainer agreement",
            panels=[
                run_metrics(
                    "KL divergence and importance",
                    "kl_sampler_trainer",
                    "importance_mean",
                    "effective_sample_share",
                    minimum=None,
                ),
                run_metrics(
                    "What the loss left out", "clipped_share", "capped_share", "masked_share", unit="percentunit"
                ),
                run_metrics("Steps by which rows lag", "staleness_mean", "staleness_max"),
                run_metrics(
                    "Groups", "groups_trained", "groups_no_variance", "groups_too_few_usable", "groups_too_stale"
                ),
                run_metrics("Rollouts and rows of a step", "rollouts", "rows", "rollouts_masked", "rows_stale"),
                run_metrics("Optimiser steps that were left out", "skipped"),
            ],
        ),
        Row(
            title="Speed",
            panels=[
                run_metrics("Rollouts a second", "rollouts_per_second"),
                run_metrics("Tokens a second, sampled", "tokens_per_second"),
                run_metrics("Where the time went", "spent_.*_seconds", unit="s", about="Since the start of the run."),
            ],
        ),
    ],
)
