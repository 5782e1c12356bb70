"""A sweep is read strictly: what is malformed, impossible or refers to itself is refused with everything else at once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from fulmen.sweeps.file import load_sweep
from fulmen.sweeps.trials import trial_config, trial_configs
from fulmen.train_toml.reader import ConfigError
from fulmen.train_toml.train import load_train_config

TRAIN = """
name = "tiny"
[policy]
name = "tiny"
version = "resources/policy.tiny/versions/1"
[data]
demonstrations = "lines.jsonl"
[[stage]]
algorithm = "sft"
steps = 10
"""
SWEEP = """
name = "rates"
train = "train.toml"
trials = 9
seed = 3
[steps]
setting = "sft.steps"
min = 5
max = 50
[search]
"sft.learning_rate" = { low = 1e-5, high = 1e-2, log = true }
"sft.batch_size" = [2, 4]
"sft.optimizer.kind" = ["adamw", "sgd"]
"sft.optimizer.beta1" = { low = 0.8, high = 0.95 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.toml").write_text(TRAIN)
    (tmp_path / "lines.jsonl").write_text('{"messages": [{"role": "assistant", "content": "1"}]}\n')
    return tmp_path


def written(folder: Path, text: str) -> Path:
    path = folder / "sweep.toml"
    path.write_text(text)
    return path


def problems(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_sweep(written(folder, text))
    return "\n".join(caught.value.problems)


def test_the_trials_of_a_file_are_always_the_same_and_all_different(folder):
    sweep = load_sweep(written(folder, SWEEP))
    assert sweep.rungs == ((9, 5), (3, 15), (1, 50))
    settings = sweep.settings()
    assert settings == load_sweep(written(folder, SWEEP)).settings()
    assert len({tuple(each.values()) for each in settings}) == 9
    rates = [each["sft.learning_rate"] for each in settings]
    assert all(1e-5 <= rate <= 1e-2 for rate in rates)
    # Evenly by the logarithm: some in the lower half of it.
    assert min(rates) < 3e-4 < max(rates)
    assert load_sweep(written(folder, SWEEP.replace("seed = 3", "seed = 4"))).settings() != settings


def test_lists_alone_are_combined_without_repetition_however_many_there_are(folder):
    head = SWEEP.partition("[search]")[0]
    few = load_sweep(written(folder, f'{head}[search]\n"sft.batch_size" = [1, 2, 3]\n"sft.seed" = [1, 2, 3]\n'))
    assert len({tuple(each.values()) for each in few.settings()}) == 9
    many = "\n".join(f'"sft.a{n}" = {list(range(100))}' for n in range(9))
    assert len(load_sweep(written(folder, f"{head}[search]\n{many}\n")).settings()) == 9


def test_a_trial_is_the_training_with_its_settings_and_the_steps_of_its_rung(folder):
    sweep = load_sweep(written(folder, SWEEP))
    plan = load_train_config(sweep.train)
    settings = {"sft.learning_rate": 1e-05, "sft.batch_size": 2, "sft.optimizer.kind": "sgd"}
    [stage] = trial_config(plan, sweep, settings, 15).stages
    assert stage.settings == {"steps": 15, "learning_rate": 1e-5, "batch_size": 2, "optimizer": {"kind": "sgd"}}
    assert [config.stages[0].settings["steps"] for config in trial_configs(plan, sweep)] == [5, 50] * 9


def test_every_problem_is_reported_at_once(folder):
    found = problems(
        folder,
        """
name = "Not a name"
train = "nothing.toml"
trials = 1
goal = "most"
colour = "blue"
[steps]
setting = "steps"
min = 0
[search]
"sft.a" = []
"sft.b" = { low = 2, high = 1 }
"sft.c" = { low = 0, high = 1, log = true }
"sft.d" = [1, 1]
""",
    )
    for expected in (
        "name: at most 24 characters", "train: there is no file", "trials: must be a whole number from 2",
        "goal: must be one of max, min", "colour: no such key", 'write a setting with its algorithm in quotes',
        "steps.min: must be a whole number from 1", "steps.max: is required", "must be a list of values, or",
        "low (2) must be less than high (1)", "low must be greater than 0 with log", "has a value twice",
    ):  # fmt: skip
        assert expected in found, found


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('train = "train.toml"', 'train = "sweep.toml"', "names the sweep itself"),
        ('"sft.batch_size" = [2, 4]', '"sft.steps" = [2, 4]', "is the budget of the trials"),
        ('"sft.batch_size" = [2, 4]', '"sft.optimizer" = [2, 4]', '"sft.optimizer.kind" is a part of "sft.optimizer"'),
        ("max = 50", "max = 4", "steps.min: is 5, more than max (4)"),
        ("max = 50", "max = 500", "5 rungs with a factor of 3 need 81 or more"),
        (SWEEP.partition("[search]")[2], '\n"sft.batch_size" = [2, 4]\n', "[search] has 2 different settings"),
        (SWEEP.partition("[search]")[2], '\n"sft.x" = { low = 1.0, high = 1.0001 }\n', "[search] has 1 different"),
    ],
)
def test_what_is_cyclic_or_impossible_is_refused(folder, old, new, problem):
    assert problem in problems(folder, SWEEP.replace(old, new))


def test_settings_of_no_stage_and_weights_that_would_be_those_of_the_trial_before_are_refused(folder):
    train = TRAIN.replace('version = "resources/policy.tiny/versions/1"\n', "")
    (folder / "train.toml").write_text(train)
    sweep = load_sweep(written(folder, SWEEP.replace('"sft.batch_size"', '"grpo.group_size"')))
    with pytest.raises(ConfigError) as caught:
        trial_configs(load_train_config(sweep.train), sweep)
    first, second = caught.value.problems
    assert first.startswith("policy: needs base, build, path or version")
    assert second == "\"grpo.group_size\": no stage of train.toml has the algorithm 'grpo'"


def test_the_file_of_the_documents_is_valid(folder, repository_root):
    shown = (repository_root / "docs/sweeps.md").read_text().partition("```toml\n")[2].partition("```")[0]
    sweep = load_sweep(written(folder, shown))
    assert sweep.rungs == ((9, 10), (3, 30), (1, 90))
    assert len(sweep.settings()) == 9


HEAD = SWEEP.partition("[search]")[0] + "[search]\n"


def test_more_combinations_than_a_machine_counts_are_drawn_from(folder):
    many = "\n".join(f'"sft.a{n}" = {list(range(100))}' for n in range(100))
    settings = load_sweep(written(folder, f"{HEAD}{many}\n")).settings()
    assert len({tuple(each.values()) for each in settings}) == 9


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (f'"sft.a" = {{ low = 1, high = 1{"0" * 400} }}', "must be a list of values, or"),
        ('"sft.a" = { low = -1.7e308, high = 1.7e308 }', "is too wide"),
        (f'"sft.a" = {list(range(1001))}', "has 1001 values; at most 1000 are possible"),
        ("\n".join(f'"sft.a{n}" = [1, 2]' for n in range(101)), "has 101 settings; at most 100 are possible"),
    ],
)
def test_what_no_computer_draws_from_is_refused(folder, line, problem):
    assert problem in problems(folder, f"{HEAD}{line}\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [(f"a = 1{'0' * 5000}\n", "too many digits"), (f"a = {'[' * 5000}{']' * 5000}\n", "nested too deeply")],
)
def test_a_file_that_python_cannot_read_is_refused(folder, text, reason):
    for load in (load_sweep, load_train_config):
        with pytest.raises(ConfigError) as caught:
            load(written(folder, text))
        assert reason in f"{caught.value} {caught.value.problems}"


def test_a_number_stays_within_its_range_when_it_is_rounded(folder):
    sweep = load_sweep(written(folder, f'{HEAD}"sft.a" = {{ low = 0.9, high = 0.99999 }}\n'))
    (kind,) = sweep.search.values()
    chance = Highest()
    assert kind.drawn(chance) == 0.99999


class Highest(random.Random):
    """Draws the highest number of all ranges."""

    def random(self) -> float:
        return 1 - 2**-53


def test_one_and_true_are_two_values(folder):
    sweep = load_sweep(written(folder, SWEEP.replace("trials = 9", "trials = 2").replace("max = 50", "max = 5")
                               .partition("[search]")[0] + '[search]\n"sft.a" = [1, true]\n'))  # fmt: skip
    assert sorted(map(str, (each["sft.a"] for each in sweep.settings()))) == ["1", "True"]


@pytest.mark.parametrize("value", ["😀", 'a"\\\n\x00\x7f\u2028', {"é 😀": ["😀", 1e22, True]}])
def test_values_of_any_characters_are_those_of_the_trial(folder, value):
    sweep = load_sweep(written(folder, SWEEP))
    [stage] = trial_config(load_train_config(sweep.train), sweep, {"sft.text": value}, 5).stages
    assert stage.settings["text"] == value
