"""The report of a run: where its time went, and with what it was made."""

import json
from datetime import UTC, datetime

from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.report import curve, report
from fulmen_algorithm.runs.run import PolicySpec, TrainingRun


def run() -> TrainingRun:
    return TrainingRun(
        name="trainingRuns/arithmetic-1",
        project="projects/default",
        display_name="",
        algorithm="grpo",
        settings_json=json.dumps({"steps": 2}),
        policy=PolicySpec(name="arithmetic"),
        inputs={},
        create_time=datetime(2026, 3, 14, tzinfo=UTC),
        provenance={"package.torch": "2.13.0", "input.train_tasks.sha256": "ab" * 32},
    )


def steps() -> list[StepMetrics]:
    return [
        StepMetrics(step=n, values={"reward_mean": n / 2, "spent_train_seconds": 3.0 * n, "spent_exchange_seconds": n})
        for n in (1, 2)
    ]


def test_time_is_told_by_its_sums_at_the_last_step_most_first() -> None:
    told = report(run(), steps(), [], {}, []).markdown

    assert "| training | 6.0 | 75% |\n| exchanging gradients | 2.0 | 25% |" in told


def test_what_it_was_made_with_and_how_to_do_it_again_is_told() -> None:
    told = report(run(), steps(), [], {}, []).markdown

    assert "| package.torch | `2.13.0` |" in told
    assert "`fulmen run reproduce arithmetic-1`" in told


def test_the_picture_needs_a_reward_or_a_loss() -> None:
    assert report(run(), steps(), [], {}, []).curve_png.startswith(b"\x89PNG")
    assert report(run(), [StepMetrics(step=1, values={"tokens": 3.0})], [], {}, []).curve_png == b""


def test_the_picture_shows_rewards_below_zero() -> None:
    def drawn(*rewards: float) -> bytes:
        values = [StepMetrics(step=n, values={"reward_mean": reward}) for n, reward in enumerate(rewards)]
        return curve(values)

    assert drawn(-2.0, -1.0) != drawn(-1.0, -2.0)
