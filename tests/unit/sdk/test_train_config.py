"""train.toml: read strictly, every problem at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from fulmen.train_toml.train import ConfigError, load_agent_and_data, load_train_config, with_overrides

GOOD = """
name = "arithmetic"
[policy]
name = "arithmetic"
build = "make_model.py:build"
[agent]
python = "agent.py:solve"
grader = "grader.py:grade"
[data]
train = "train.jsonl"
[[stage]]
algorithm = "sft"
steps = 200
[[stage]]
algorithm = "grpo"
steps = 100
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("make_model.py", "agent.py", "grader.py", "train.jsonl"):
        (tmp_path / name).write_text("{}\n")
    return tmp_path


def load(folder: Path, text: str):
    path = folder / "train.toml"
    path.write_text(text)
    return load_train_config(path)


def problems_of(folder: Path, text: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as raised:
        load(folder, text)
    return raised.value.problems


def test_a_good_file_is_read_whole(folder: Path) -> None:
    config = load(folder, GOOD)

    assert config.name == "arithmetic"
    assert config.policy.build == "make_model.py:build"
    assert config.agent.grader == "grader.py:grade"
    assert config.data.train == (folder / "train.jsonl").resolve()
    assert [(stage.algorithm, dict(stage.settings)) for stage in config.stages] == [
        ("sft", {"steps": 200}),
        ("grpo", {"steps": 100}),
    ]


def test_conversations_are_imitated_without_an_agent(folder: Path) -> None:
    without = GOOD.replace('[agent]\npython = "agent.py:solve"\ngrader = "grader.py:grade"\n', "")
    config = load(folder, without)
    assert (config.agent, config.secrets, config.runs_code) == (None, (), True)
    assert not load(folder, without.replace("build =", "path = '.' #")).runs_code


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('name = "arithmetic"\n[', 'nane = "x"\n[', "nane: no such key; did you mean 'name'?"),
        ("build =", "biuld =", "policy.biuld: no such key; did you mean 'build'?"),
        ("grader =", "graders =", "agent.graders: no such key; did you mean 'grader'?"),
        ("train =", "trian =", "data.trian: no such key; did you mean 'train'?"),
        ("[[stage]]", "[[stages]]", "stages: no such key; did you mean 'stage'?"),
        ('name = "arithmetic"\n[', 'name = "Arith metic"\n[', "name: at most 32 characters"),
        ('"agent.py:solve"', '"agent.py"', 'agent.python: write it as "file.py:name"'),
        ('"agent.py:solve"', '"none.py:solve"', "agent.python: there is no file"),
        ('"train.jsonl"', '"none.jsonl"', "data.train: there is no file"),
        ('python = "agent.py:solve"', "python = 3", "agent.python: must be a text"),
        ('python = "agent.py:solve"', "command = []", "agent.command: must be a list of texts"),
        ('python = "agent.py:solve"', "", "agent: give one of python ="),
        ("build =", 'path = "."\nbuild =', "policy: give one of base, build, path and version"),
        ("build =", 'base = "Qwen/Qwen3-0.6B"\n#', "base: must be hf:organisation/name"),
        ("steps = 200", "steps = 2024-01-01", "stage 1.steps: must be a text, number"),
    ],
)
def test_what_is_wrong_is_named(folder: Path, old: str, new: str, problem: str) -> None:
    assert any(problem in each for each in problems_of(folder, GOOD.replace(old, new)))


def test_all_problems_are_reported_at_once(folder: Path) -> None:
    text = GOOD.replace("build =", "biuld =").replace("train.jsonl", "none.jsonl").replace("grader =", "graders =")

    assert len(problems_of(folder, text)) == 3


def test_a_file_without_stages_is_refused(folder: Path) -> None:
    assert problems_of(folder, GOOD.partition("[[stage]]")[0]) == ("stage: at least one [[stage]] is required",)


def test_what_is_not_toml_is_one_clear_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(folder, "name = ")


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_train_config(tmp_path / "none.toml")


def test_an_attempt_needs_no_more_than_an_agent(folder: Path) -> None:
    path, agent = folder / "train.toml", '[agent]\npython = "agent.py:solve"\n'

    path.write_text(agent)
    read, data = load_agent_and_data(path)
    assert (read.python, data.train) == ("agent.py:solve", None)
    path.write_text(f'{agent}[data]\ntrain = "train.jsonl"\n[policy]\npath = "weights that are not there"\n')
    assert load_agent_and_data(path)[1].train == (folder / "train.jsonl").resolve()


def test_keys_that_an_attempt_does_not_need_are_no_unknown_ones(folder: Path) -> None:
    path = folder / "train.toml"
    path.write_text(GOOD.replace("[[stage]]", "[[stages]]").replace("build =", "biuld =").replace("[agent]", "[agnet]"))

    with pytest.raises(ConfigError) as raised:
        load_agent_and_data(path)

    said = "\n".join(raised.value.problems)
    for problem in (
        "stages: no such key",
        "policy.biuld: no such key",
        "agnet: no such key",
        "agent: give one of python",
    ):
        assert problem in said


def test_overrides_replace_settings_of_their_algorithm_only(folder: Path) -> None:
    config = with_overrides(load(folder, GOOD), ["grpo.steps=5", "sft.schedule=cosine", "grpo.rate=1e-3"], seed=7)

    assert dict(config.stages[0].settings) == {"steps": 200, "schedule": "cosine", "seed": 7}
    assert dict(config.stages[1].settings) == {"steps": 5, "rate": 1e-3, "seed": 7}


def test_an_override_with_dots_changes_one_entry_of_a_table(folder: Path) -> None:
    given = load(folder, GOOD)
    config = with_overrides(given, ['grpo.loss={kind = "clip", low = 0.1}', "grpo.loss.high=0.3", "grpo.kl.kind=none"])

    assert config.stages[1].settings["loss"] == {"kind": "clip", "low": 0.1, "high": 0.3}
    assert config.stages[1].settings["kl"] == {"kind": "none"}
    assert "loss" not in given.stages[1].settings


@pytest.mark.parametrize(
    ("assignment", "problem"),
    [
        ("steps=5", "write it as ALGORITHM.SETTING=VALUE"),
        ("grpo.steps", "write it as ALGORITHM.SETTING=VALUE"),
        ("gpro.steps=5", "no stage has the algorithm 'gpro'; did you mean 'grpo'?"),
    ],
)
def test_a_malformed_override_is_an_error(folder: Path, assignment: str, problem: str) -> None:
    with pytest.raises(ConfigError, match="overrides") as raised:
        with_overrides(load(folder, GOOD), [assignment])

    assert problem in str(raised.value)


@pytest.mark.parametrize("given", ["scores.better", "scores.better@3", "better@best"])
def test_published_scores_are_named_by_version_or_alias(folder: Path, given: str) -> None:
    text = GOOD.replace('train = "train.jsonl"', f'train = "train.jsonl"\nscores = "{given}"')

    assert load(folder, text).data.scores == given


@pytest.mark.parametrize("given", ["Better", "resources/scores.better/versions/3", "a@", "@2"])
def test_what_names_no_scores_is_told(folder: Path, given: str) -> None:
    text = GOOD.replace('train = "train.jsonl"', f'train = "train.jsonl"\nscores = "{given}"')

    with pytest.raises(ConfigError) as caught:
        load(folder, text)

    assert "data.scores: the name of published scores" in str(caught.value)


def test_prompts_other_runs_and_further_tasks_are_named(folder: Path) -> None:
    (folder / "prompt.md").write_text("Answer {question}.")
    more = '[data]\nprompt = "prompt.md"\ntest = "train.jsonl"\nrollouts = "mine-1-grpo"'
    data = load(folder, GOOD.replace("[data]", more)).data
    assert data.prompt == (folder / "prompt.md").resolve()
    assert data.test == (folder / "train.jsonl").resolve()
    assert data.rollouts == "mine-1-grpo"
    assert data.prompt in data.files


def test_a_training_without_weights_needs_no_policy(folder: Path) -> None:
    without = GOOD.replace('[policy]\nname = "arithmetic"\nbuild = "make_model.py:build"\n', "")
    assert not load(folder, without).policy.name
    # Who writes the table means a policy.
    assert any(
        "policy.name" in each for each in problems_of(folder, GOOD.replace('[policy]\nname = "arithmetic"', "[policy]"))
    )
