"""`fulmen train --check` looks up what a training names as its creation does: with the same answer, and creating nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fulmen.rpc.services import Targets, connect
from fulmen.store.v1.resource_service_pb2 import ListResourceVersionsRequest
from fulmen.train_toml.train import ConfigError, load_train_config
from fulmen.training.plan import RunNames
from fulmen.training.task_files import read_datasets
from fulmen.training.training import Training
from fulmen_cli.exits import Exit
from fulmen_cli.main import app
from fulmen_cli.train.check import packed
from fulmen_service_kit.security.tokens import Role
from tests.support.algorithm.service_process import serving_at
from tests.support.cli.command_runner import CliRunner
from tests.support.store.running import StoreHandle

BEGIN = """
name = "tool"
[policy]
name = "tool"
build = "agent.py:build"
[agent]
python = "agent.py:solve"
"""
STAGE = """
[[stage]]
algorithm = "grpo"
"""
DATA = '[data]\ntrain = "tasks.jsonl"\n'


@pytest.fixture
async def checked(store: StoreHandle, tmp_path: Path):
    """Yields a function that checks a train.toml at a service, and one that asks that service to create its runs."""
    (tmp_path / "agent.py").write_text("def solve(task): return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text('{"input": "hello"}\n')
    (tmp_path / "talks.jsonl").write_text('{"messages": [{"role": "assistant", "content": "hello"}]}\n')
    file, token = tmp_path / "train.toml", store.token(Role.CLIENT)
    async with serving_at(tmp_path / "state", store.target, TOKEN=store.token(Role.SERVICE)) as (_, target):

        async def check(text: str, *, status: Exit = Exit.USAGE) -> str:
            file.write_text(text)
            words = ["train", file, "--check", "--algorithm-target", target, "--store-target", store.target]
            arguments = [*map(str, words), "--token", token]
            done = await asyncio.to_thread(CliRunner().invoke, app, arguments, env={"COLUMNS": "300", "TERM": "dumb"})
            assert done.exit_code == status, done.output
            return done.output

        async def creates() -> tuple[str, ...]:
            plan = load_train_config(file)
            targets = Targets(store=store.target, algorithm=target, llm_proxy="127.0.0.1:1")
            async with connect(targets, token=token) as client:
                training = Training(
                    services=client, config=plan, bundle=packed(plan), datasets=read_datasets(plan.data),
                    names=RunNames.now("projects/default", plan.name),
                )  # fmt: skip
                with pytest.raises(ConfigError) as refused:
                    await training.begin()
                return refused.value.problems

        yield check, creates


async def test_a_reward_model_that_does_not_exist_is_refused_by_both(checked) -> None:
    check, creates = checked
    refused = await check(BEGIN + DATA + STAGE + 'reward_model = { model = "judge@1" }\n')
    problem = "settings.reward_model: there is no resources/policy.judge/versions/1 in the project of the run"
    assert f"stage 1 (grpo): {problem}" in refused
    assert await creates() == (f"stage 1 (grpo): {problem}",)


async def test_everything_that_is_not_there_is_told_at_once(checked) -> None:
    check, _ = checked
    text = BEGIN.replace('build = "agent.py:build"', 'version = "resources/policy.tool/versions/3"')
    text = text.replace('solve"\n', 'solve"\nsecrets = ["A_KEY"]\n')
    data = '[data]\ntrain = "tasks.jsonl"\nscores = "better@2"\nrollouts = "gone"\n'
    later = '[[stage]]\nalgorithm = "dpo"\n'
    refused = await check(text + data + STAGE + 'reward_model = { model = "judge@1" }\n' + later)
    for problem in (
        "The scores better@2",
        "A_KEY: run `fulmen secret set A_KEY`",
        "stage 1 (grpo): policy.version: there is no resources/policy.tool/versions/3",
        "stage 1 (grpo): settings.reward_model: there is no resources/policy.judge/versions/1",
        "stage 2 (dpo): inputs.rollouts: there is no training run projects/default/trainingRuns/gone",
    ):
        assert problem in refused, refused


async def test_what_is_yet_to_be_published_or_trained_is_no_problem(checked, store: StoreHandle) -> None:
    check, _ = checked
    data = '[data]\ntrain = "tasks.jsonl"\ndemonstrations = "talks.jsonl"\n'
    shown = await check(BEGIN + data + '[[stage]]\nalgorithm = "sft"\n' + STAGE, status=Exit.OK)
    assert "train.toml is valid." in shown
    assert "not checked" not in shown
    for resource in ("bundle.tool", "agent.tool", "dataset.tool.train_tasks"):
        request = ListResourceVersionsRequest(parent=f"resources/{resource}")
        assert not (await (await store.stubs()).resources.ListResourceVersions(request)).resources
