"""What runs learn."""

from __future__ import annotations

from boards.panels import Board, Panel, Row, Variable, figures

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
                    most=1,
                    queries={"{{run}}": 'fulmen_algorithm_run_step{run=~"$run"} / fulmen_algorithm_run_steps_planned'},
                ),
                figures("Time left", "eta_seconds", unit="s"),
            ],
        ),
        Row(
            title="Learning",
            panels=[
                figures("Reward, as sampled", "reward_mean", least=None),
                figures("Validation", "validation_accuracy", least=None),
                figures("Loss", "loss", least=None),
                figures("Norm of the gradient, before clipping", "grad_norm"),
                figures("Entropy", "entropy_estimate", least=None, about="Falls to nothing where a policy collapses."),
                figures("Learning rate", "learning_rate", unit="sci"),
            ],
        ),
        Row(
            title="Sampler and trainer agreement",
            panels=[
                figures(
                    "KL divergence and importance",
                    "kl_sampler_trainer",
                    "importance_mean",
                    "effective_sample_share",
                    least=None,
                ),
                figures("What the loss left out", "clipped_share", "capped_share", "masked_share", unit="percentunit"),
                figures("Steps by which rows lag", "staleness_mean", "staleness_max"),
                figures("Groups", "groups_trained", "groups_no_variance", "groups_too_few_usable", "groups_too_stale"),
                figures("Rollouts and rows of a step", "rollouts", "rows", "rollouts_masked", "rows_stale"),
                figures("Optimiser steps that were left out", "skipped"),
            ],
        ),
        Row(
            title="Speed",
            panels=[
                figures("Rollouts a second", "rollouts_per_second"),
                figures("Tokens a second, sampled", "tokens_per_second"),
                figures("Where the time went", "spent_.*_seconds", unit="s", about="Since the beginning of the run."),
            ],
        ),
    ],
)
