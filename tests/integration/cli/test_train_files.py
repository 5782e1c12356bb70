"""`fulmen train` shows what leaves the machine, before it does, and refuses agents whose secrets do not exist."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import Result

from fulmen.rpc.services import Targets, connect
from fulmen.store.v1 import secret_service_pb2 as pb
from fulmen.train_toml.agent import AgentConfig
from fulmen.train_toml.reader import ConfigError
from fulmen.training.agent_secrets import require_secrets
from fulmen.training.bundle import Bundle, pack_bundle
from fulmen.training.publish import publish
from fulmen_cli.exits import Exit
from fulmen_cli.main import app
from tests.support.cli.command_runner import CliRunner
from tests.support.cli.screens import check_screen
from tests.support.store.running import StoreHandle

Fulmen = Callable[..., Awaitable[Result]]
CONFIG = """
name = "tool"
[policy]
name = "tool"
build = "agent.py:build"
[agent]
python = "agent.py:solve"
secrets = ["WEATHER_KEY"]
include = ["certs/test.pem"]
[data]
train = "tasks.jsonl"
[[stage]]
algorithm = "grpo"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Returns the folder of an agent, with much that is not to leave it."""
    files = {
        "train.toml": CONFIG,
        "agent.py": "def solve(task): return 1.0\n",
        "tasks.jsonl": '{"input": "hello"}\n',
        ".env": "OPENAI_API_KEY=sk-secret\n",
        "certs/test.pem": "a test's certificate\n",
        "certs/server.pem": "another\n",
        "node_modules/a/index.js": "1\n",
        "notes/today.txt": "private\n",
        ".gitignore": "notes/\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


async def test_a_dry_run_lists_what_is_taken_and_left_out_and_publishes_nothing(fulmen: Fulmen, folder: Path) -> None:
    shown = await fulmen("train", folder / "train.toml", "--dry-run")
    check_screen("train-dry-run", shown.stdout)
    listed = json.loads((await fulmen("train", folder / "train.toml", "--dry-run", "-o", "json")).stdout)
    assert [each["name"] for each in listed["files"]] == [
        ".gitignore", "agent.py", "certs/test.pem", "tasks.jsonl", "train.toml",
    ]  # fmt: skip
    assert json.loads((await fulmen("resources", "list", "-o", "json")).stdout) == []


async def test_a_check_says_that_no_service_was_asked_for_gpus(folder: Path) -> None:
    words = ["train", str(folder / "train.toml"), "--check", "--state-dir", str(folder / "none")]
    nobody = dict.fromkeys(("FULMEN_STORE_TARGET", "FULMEN_ALGORITHM_TARGET", "FULMEN_LLM_PROXY_TARGET"))
    shown = await asyncio.to_thread(CliRunner().invoke, app, words, env={**nobody, "COLUMNS": "200"})
    assert "The placement of the stages was not planned: no stack is running, and no service is named." in shown.stdout
    told = await asyncio.to_thread(CliRunner().invoke, app, [*words, "-o", "json"], env=nobody)
    answer = json.loads(told.stdout)
    assert (answer["gpus"], answer["gpus_not_planned"]) == ([], "no stack is running, and no service is named.")


async def test_a_check_without_a_stack_finds_every_typo_of_file_stages_and_data_at_once(
    fulmen: Fulmen, folder: Path
) -> None:
    (folder / "train.toml").write_text(
        CONFIG.replace("include", "includes")
        + 'group_sise = 8\nloss = {kind = "gsp"}\n'
        + '[[stage]]\nalgorithm = "gropo"\n[[stage]]\nalgorithm = "sft"\nsteps = -1\n'
    )
    (folder / "tasks.jsonl").write_text('{"input": "hello"}\nnot JSON\n')

    refused = await fulmen("train", folder / "train.toml", "--check", status=Exit.USAGE)

    lines = " ".join(refused.output.split())
    for problem in (
        "agent.includes: no such key; did you mean 'include'?",
        "stage 1 (grpo): settings.group_sise: no such setting; did you mean 'group_size'?",
        "stage 1 (grpo): settings.loss: kind 'gsp' is not one of",
        "stage 2 (gropo): algorithm: 'gropo' is not one of",
        "stage 3 (sft): settings.steps: should be greater",
        "stage 3 (sft): inputs.demonstrations: sft needs one of",
        "tasks.jsonl:2: ",
    ):
        assert problem in lines, refused.output
    assert "needed by grpo" not in lines


async def test_a_check_says_which_stages_need_the_agent_that_is_missing(fulmen: Fulmen, folder: Path) -> None:
    agent, data = CONFIG.partition("[agent]")[0], "[data]" + CONFIG.partition("[data]")[2]
    imitation = '[[stage]]\nalgorithm = "sft"\n'
    (folder / "conversations.jsonl").write_text('{"messages": [{"role": "assistant", "content": "hello"}]}\n')
    (folder / "train.toml").write_text(
        agent + data.replace("[data]", '[data]\ndemonstrations = "conversations.jsonl"') + imitation
    )
    refused = await fulmen("train", folder / "train.toml", "--check", status=Exit.USAGE)
    (line,) = [line.strip() for line in refused.output.splitlines() if line.startswith("  stage")]
    assert line == "stage 1 (grpo): inputs.agent: is required by grpo; no agent is given ([agent])"

    (folder / "train.toml").write_text(f'{agent}[data]\ndemonstrations = "conversations.jsonl"\n{imitation}')
    assert "train.toml is valid." in (await fulmen("train", folder / "train.toml", "--check")).stdout


async def test_where_no_algorithm_service_is_installed_a_check_says_what_was_not_checked(
    fulmen: Fulmen, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fulmen_algorithm.algorithms.registry", None)
    (folder / "train.toml").write_text(CONFIG + "group_sise = 8\n")

    shown = await fulmen("train", folder / "train.toml", "--check")

    assert "the settings of its stages, which were not checked" in " ".join(shown.stdout.split())
    answer = json.loads((await fulmen("train", folder / "train.toml", "--check", "-o", "json")).stdout)
    assert answer["settings_checked"] is False


async def test_a_file_with_a_key_in_it_is_refused_by_line_also_in_a_dry_run(fulmen: Fulmen, folder: Path) -> None:
    key = "sk-proj-" + "a1B2" * 12
    (folder / "agent.py").write_text(f"import os\nKEY = '{key}'\n")
    refused = await fulmen("train", folder / "train.toml", "--dry-run", status=Exit.USAGE)
    assert "agent.py, line 2: looks like an OpenAI key" in refused.output
    assert key not in refused.output


async def test_the_list_is_shown_before_the_first_publication_alone(store: StoreHandle, folder: Path) -> None:
    shown: list[Bundle] = []
    targets = Targets(store=store.target, algorithm="127.0.0.1:1", llm_proxy="127.0.0.1:1")
    agent = AgentConfig(python="agent.py:solve")
    async with connect(targets, token=store.token()) as client:
        for _ in range(2):
            bundle = pack_bundle(folder)
            await publish(client, name="tool", agent=agent, bundle=bundle, datasets={}, show_first=shown.append)
    assert [each.files for each in shown] == [(".gitignore", "agent.py", "tasks.jsonl", "train.toml")]


async def test_an_agent_whose_secrets_do_not_exist_is_refused_with_all_of_them(store: StoreHandle) -> None:
    targets = Targets(store=store.target, algorithm="127.0.0.1:1", llm_proxy="127.0.0.1:1")
    async with connect(targets, token=store.token()) as client:
        await client.secrets.SetSecret(pb.SetSecretRequest(name="WEATHER_KEY", value=b"sunny-and-warm"))
        await require_secrets(client, ["WEATHER_KEY"])
        with pytest.raises(ConfigError) as refused:
            await require_secrets(client, ["WEATHER_KEY", "A_KEY", "B_KEY"])
    assert refused.value.problems == (
        "A_KEY: run `fulmen secret set A_KEY`",
        "B_KEY: run `fulmen secret set B_KEY`",
    )


async def test_a_stack_in_this_process_takes_an_agents_secrets_from_the_shell(
    store: StoreHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEATHER_KEY", "sunny-and-warm")
    monkeypatch.delenv("B_KEY", raising=False)
    targets = Targets(store=store.target, algorithm="127.0.0.1:1", llm_proxy="127.0.0.1:1")
    async with connect(targets, token=store.token()) as client:
        await require_secrets(client, ["WEATHER_KEY"], in_process=True)
        with pytest.raises(ConfigError, match="B_KEY: set the variable B_KEY in this shell"):
            await require_secrets(client, ["WEATHER_KEY", "B_KEY"], in_process=True)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('secrets = ["OPENAI_API_KEY"]', "through the proxy"),
        ('secrets = ["openai"]', "agents never get"),
        ('secrets = ["lower_case"]', "agents never get"),
        ('secrets = ["A", "A"]', "names must be unique"),
        ('secrets = ["A"]\nenvironment = {A = "x"}', "also in environment"),
        ("secrets = 3", "a list of texts"),
    ],
)
async def test_secrets_that_agents_cannot_have_are_refused_in_the_configuration(
    fulmen: Fulmen, folder: Path, line: str, problem: str
) -> None:
    (folder / "train.toml").write_text(CONFIG.replace('secrets = ["WEATHER_KEY"]', line))
    refused = await fulmen("train", folder / "train.toml", "--dry-run", status=Exit.USAGE)
    assert problem in refused.output
