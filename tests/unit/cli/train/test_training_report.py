"""What a training prints and saves at its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.train_toml.train import AgentConfig, DataConfig, PolicyConfig, StageConfig, TrainConfig
from fulmen.training.plan import RunNames, training_run
from fulmen_cli.train.report import (
    Sample,
    SamplePair,
    StageOutcome,
    accuracy_line,
    compared_stage,
    print_summary,
    save_report,
    trained_model,
)

INPUTS = {
    use: f"resources/{use}/versions/1"
    for use in ("bundle", "agent", "train_tasks", "validation_tasks", "demonstrations")
}


def outcome(algorithm: str, **results: float) -> StageOutcome:
    run = training_run_pb2.TrainingRun(algorithm=algorithm, step=3, model_path="/models/3", results=results)
    return StageOutcome(run=run, seconds=1.5, markdown="# Training run\n\n## Steps\n", curve_png=algorithm.encode())


def config(policy: PolicyConfig) -> TrainConfig:
    stages = (StageConfig(algorithm="sft", settings={"steps": 2}), StageConfig(algorithm="grpo", settings={}))
    return TrainConfig(
        file=Path("/agent/train.toml"), name="adder", policy=policy, agent=AgentConfig(python="a.py:f"),
        data=DataConfig(), stages=stages,
    )  # fmt: skip


def test_the_last_line_is_of_the_last_stage_that_measured_before_and_after() -> None:
    first = outcome("sft", validation_accuracy_before=0.0, validation_accuracy_after=0.4)
    second = outcome("grpo", validation_accuracy_before=0.404, validation_accuracy_after=0.985)
    third = outcome("sft", loss=1.0)

    assert accuracy_line([first, second, third]) == "validation accuracy 0.40 -> 0.98"
    assert accuracy_line([third]) == ""


def test_an_evaluation_at_the_end_hides_neither_the_model_nor_what_was_compared() -> None:
    trained = outcome("grpo", validation_accuracy_before=0.4, validation_accuracy_after=0.9)
    run = training_run_pb2.TrainingRun(
        algorithm="evaluate",
        results={"test_pass_at_1": 0.9, "test_pass_at_1_low": 0.85, "test_pass_at_1_high": 0.95},
    )
    evaluated = StageOutcome(run=run, seconds=1.0, markdown="", curve_png=b"")

    assert compared_stage([trained, evaluated]) is trained
    assert compared_stage([evaluated]) is None
    assert trained_model([trained, evaluated]) == "/models/3"
    assert trained_model([evaluated]) == ""
    assert accuracy_line([trained, evaluated]) == "test pass@1 0.900 (0.850 to 0.950)"


def test_the_summary_names_the_rollout_that_failed_first(capsys: pytest.CaptureFixture[str]) -> None:
    stages = [outcome("sft"), replace(outcome("grpo"), failure="first failure: 1: ValueError: no")]
    print_summary(Console(), stages, None, Path("reports"), has_store=True)

    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "failure" in line] == ["grpo: first failure: 1: ValueError: no"]


def test_the_report_holds_every_stage_and_its_curve(tmp_path: Path) -> None:
    sample = Sample(rollout="projects/default/rollouts/1", task="{}", outcome="7", reward=1.0)
    save_report(tmp_path, "A title", [outcome("sft"), outcome("grpo")], SamplePair(before=sample, after=sample))

    text = (tmp_path / "report.md").read_text()
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings == [
        "# A title",
        "## One validation task, before and after",
        "## Stage 1: sft",
        "### Training run",
        "#### Steps",
        "## Stage 2: grpo",
        "### Training run",
        "#### Steps",
    ]
    assert (tmp_path / "1-sft.png").read_bytes() == b"sft"
    assert (tmp_path / "curve.png").read_bytes() == b"grpo"


def test_a_stage_gets_the_inputs_that_its_algorithm_reads() -> None:
    built = config(PolicyConfig(name="adder", build="make.py:build"))
    read = {"sft": ["demonstrations"], "grpo": ["agent", "train_tasks", "validation_tasks"]}
    sft = training_run(built, built.stages[0], name="x", inputs=INPUTS, read=read, continues=False)
    grpo = training_run(built, built.stages[1], name="y", inputs=INPUTS, read=read, continues=True)

    assert set(sft.inputs) == {"demonstrations", "bundle"}
    assert sft.policy.build == "make.py:build"
    assert sft.settings_json == '{"steps": 2}'
    assert set(grpo.inputs) == {"agent", "train_tasks", "validation_tasks"}
    assert grpo.policy.name == "adder"
    assert grpo.policy.WhichOneof("initial") is None


def test_a_runs_id_fits_the_contract() -> None:
    names = RunNames(project="projects/p", prefix=f"{'a' * 32}-20260314-101500-x7k2")
    long = names.of(12, StageConfig(algorithm="grpo" * 5, settings={})).removeprefix("projects/p/trainingRuns/")

    assert len(long) == 63
    assert not long.endswith("-")
