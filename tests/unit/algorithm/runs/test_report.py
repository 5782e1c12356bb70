"""The report of a run: where its time went, and with what it was made."""

from fulmen_algorithm.runs.events import StepMetrics
from fulmen_algorithm.runs.report import curve, report
from tests.support.algorithm.new_run import training_run

RUN = training_run(provenance={"package.torch": "2.13.0", "input.train_tasks.sha256": "ab" * 32})


def steps() -> list[StepMetrics]:
    return [
        StepMetrics(step=n, values={"reward_mean": n / 2, "spent_train_seconds": 3.0 * n, "spent_exchange_seconds": n})
        for n in (1, 2)
    ]


def test_a_report_shows_times_packages_and_how_to_reproduce_the_run():
    shown = report(RUN, steps(), [], {}, []).markdown
    assert "| training | 6.0 | 75% |\n| exchanging gradients | 2.0 | 25% |" in shown, "the longest comes first"
    assert "| package.torch | `2.13.0` |" in shown
    assert "`fulmen run reproduce small`" in shown


def test_the_picture_needs_a_reward_or_a_loss():
    assert report(RUN, steps(), [], {}, []).curve_png.startswith(b"\x89PNG")
    assert report(RUN, [StepMetrics(step=1, values={"tokens": 3.0})], [], {}, []).curve_png == b""


def test_the_picture_shows_rewards_below_zero():
    def drawn(*rewards: float) -> bytes:
        values = [StepMetrics(step=n, values={"reward_mean": reward}) for n, reward in enumerate(rewards)]
        return curve(values)

    assert drawn(-2.0, -1.0) != drawn(-1.0, -2.0)
