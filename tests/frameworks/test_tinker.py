"""The recipes of tinker-cookbook, unmodified, against the console: their data sets and tokenizer are in a folder, as HF_HOME."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from fulmen_service_kit.security.tokens import Role
from tests.support.console import console_of
from tests.support.services import serving, target_of
from tests.support.store.fixtures import store, store_settings
from tests.support.store.running import StoreHandle

__all__ = ["store", "store_settings"]
pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(1800), pytest.mark.long]

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-frameworks/tinker/bin/python"
WORLD = ROOT / "tests/support/frameworks"
AGENTS = ROOT / "tests/frameworks/agents"
NAME = "Qwen/Qwen3-4B-Instruct-2507"
LIMIT_S = 900.0


async def run(*argv: object, **environment: str) -> str:
    """Runs a program to its end; returns what it printed."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *map(str, argv), env=kept | environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()[-5000:]
    return output.decode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("huggingface")
    await run(sys.executable, WORLD / "tinker_model.py", folder / "hub")
    await run(PYTHON, WORLD / "tinker_data.py", folder, PYTHONPATH="")
    return folder


@pytest.fixture
async def programs(
    store: StoreHandle, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[dict[str, str]]:
    """Yields the environment of programs."""
    offline = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    async with AsyncExitStack() as stack:
        given = {"hub_models": "Qwen/*", "roles": True, "trains": True}
        parts = await stack.enter_async_context(serving("algorithm", store, tmp_path, **given))
        stack.push_async_callback(parts.drain)
        console = await stack.enter_async_context(console_of(store, algorithm_target=target_of(parts)))
        key = store.token(Role.CLIENT)
        yield {**offline, "TINKER_BASE_URL": console.url, "TINKER_API_KEY": key, "PYTHONPATH": ""}


async def recipe(name: str, log: Path, environment: dict[str, str], **settings: object) -> list[dict[str, Any]]:
    """Runs a recipe; returns the metrics of its steps."""
    given = [f"{key}={value}" for key, value in {"model_name": NAME, "log_path": log, **settings}.items()]
    await run(PYTHON, "-m", f"tinker_cookbook.recipes.{name}", *given, **environment)
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


async def test_the_recipe_of_supervised_learning_learns_and_resumes(programs: dict[str, str], tmp_path: Path) -> None:
    given = {"batch_size": 8, "learning_rate": 1e-2, "save_every": 5, "lora_rank": 8, "max_length": 256}
    steps = await recipe("sl_loop", tmp_path / "sl", programs, max_steps=16, **given)
    losses = [each["train_mean_nll"] for each in steps]
    print(losses)
    assert len(losses) == 16
    assert losses[-1] < 0.5 * losses[0]
    checkpoints = [json.loads(line) for line in (tmp_path / "sl/checkpoints.jsonl").read_text().splitlines()]
    assert [each["name"] for each in checkpoints] == ["000005", "000010", "000015", "final"]
    # It was killed, and goes on from its last checkpoint.
    (tmp_path / "sl/checkpoints.jsonl").write_text("".join(json.dumps(each) + "\n" for each in checkpoints[:3]))
    more = await recipe("sl_loop", tmp_path / "sl", programs, max_steps=20, **given)
    resumed = more[len(steps) :]
    assert resumed[0]["step"] == 15
    assert resumed[0]["train_mean_nll"] == pytest.approx(losses[15], rel=1e-3)


async def test_the_recipe_of_reinforcement_learning_earns_more(programs: dict[str, str], tmp_path: Path) -> None:
    steps = await recipe(
        "rl_loop",
        tmp_path / "rl",
        programs,
        batch_size=8,
        group_size=8,
        learning_rate=1e-2,
        max_tokens=12,
        lora_rank=8,
        save_every=0,
        max_steps=24,
    )
    rewards = [each["reward/total"] for each in steps]
    print(rewards)
    assert len(rewards) == 24
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2


async def test_a_program_uses_the_rest_of_the_package(programs: dict[str, str]) -> None:
    printed = await run(PYTHON, AGENTS / "tinker_program.py", NAME, **programs)
    found = json.loads(printed.splitlines()[-1])
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-5)
    assert found["after"][0] == pytest.approx(found["after"][1], rel=1e-4)
    assert found["after"][0] < found["losses"][0]
    assert found["first_score"] is None
    assert found["score"] == pytest.approx(found["expected"], rel=1e-4)
    assert found["drawn"][0] == found["drawn"][1]
    assert len(set(found["ids"])) == 2
    assert found["again"] == pytest.approx(found["after"][0], rel=1e-5)
    assert "data[0].token_ids: has an id that is not one of the model's" in found["refused"]
    assert found["capabilities"] == 0
