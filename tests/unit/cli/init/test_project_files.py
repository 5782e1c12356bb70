"""`fulmen init`: what it writes is valid and explained, and nothing of the person's is touched."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from fulmen.train_toml.train import load_train_config
from fulmen.training.bundle import pack_bundle
from fulmen.training.task_files import read_datasets
from fulmen_algorithm.runs.creation.rules import parse_settings
from fulmen_cli.exits import Exit
from fulmen_cli.init.own_app import NotAnAgent, agent_from
from fulmen_cli.init.template import Algorithm, Framework
from fulmen_cli.main import app
from tests.support.algorithm.run_service import ALGORITHMS
from tests.support.cli.command_runner import CliRunner


def init(*arguments: str | Path) -> tuple[int, str]:
    """Runs `fulmen init`; returns its exit status and what it said."""
    done = CliRunner().invoke(app, ["init", *map(str, arguments)])
    return done.exit_code, done.output


@pytest.mark.parametrize("algorithm", Algorithm)
@pytest.mark.parametrize("framework", Framework)
def test_a_new_project_is_one_that_fulmen_train_accepts(
    tmp_path: Path, framework: Framework, algorithm: Algorithm
) -> None:
    folder = tmp_path / "My Project"
    assert init(folder, "--framework", framework.value, "--algorithm", algorithm.value)[0] == Exit.OK

    config = load_train_config(folder / "train.toml")
    assert config.name == "my-project"
    assert [stage.algorithm for stage in config.stages][-1] == algorithm.value
    for stage in config.stages:
        parse_settings(ALGORITHMS[stage.algorithm], json.dumps(stage.settings))
    assert read_datasets(config.data)["train_tasks"].count == 20
    packed = pack_bundle(folder, data_files=config.data.files, agent=config.agent)
    assert (".fulmenignore" in packed.files, "grader.py" in packed.files) == (True, True)
    for path in folder.rglob("*.py"):
        compile(path.read_text(), str(path), "exec")


def test_every_setting_of_the_configuration_is_explained_and_what_is_commented_out_is_valid(tmp_path: Path) -> None:
    for algorithm in Algorithm:
        folder = tmp_path / algorithm.value
        init(folder, "--algorithm", algorithm.value)
        lines = (folder / "train.toml").read_text().splitlines()
        setting = re.compile(r"(# )?\w+ = \S")
        before = ""
        for line in lines:
            if setting.match(line):
                # Settings that belong together share the comment above them.
                assert before.startswith(("# ", "[[")) or setting.match(before), line
            before = line

    config = tmp_path / "grpo/train.toml"
    (tmp_path / "Qwen3-0.6B").mkdir()
    text = config.read_text()
    build = 'build = "make_model.py:build"\n'
    other = re.findall(r"^# (\w+ = .*)$", text, re.M)
    assert len(other) == 3
    config.write_text(text.replace(build, other[0] + "\n"))
    assert load_train_config(config).policy.base == "hf:Qwen/Qwen3-0.6B"
    config.write_text(text.replace(build, other[1] + "\n"))
    assert load_train_config(config).policy.path == str(tmp_path / "Qwen3-0.6B")
    (tmp_path / "grpo/requirements.txt").write_text("httpx==0.28.1\n")
    config.write_text(text.replace(f"# {other[2]}", other[2]))
    assert load_train_config(config).agent.requirements == "requirements.txt"


def test_training_validation_and_demonstrations_share_no_order_that_they_should_not(tmp_path: Path) -> None:
    init(tmp_path / "a")
    tasks = {
        name: [json.loads(line) for line in (tmp_path / f"a/tasks/{name}.jsonl").read_text().splitlines()]
        for name in ("train", "validation", "demonstrations")
    }
    questions = {name: {each["input"]["question"] for each in tasks[name]} for name in ("train", "validation")}
    shown = {each["messages"][1]["content"] for each in tasks["demonstrations"]}

    assert [len(each) for each in questions.values()] == [20, 20]
    assert questions["train"] <= shown
    assert not questions["validation"] & shown
    orders = json.loads((tmp_path / "a/orders.json").read_text())
    assert all(each["answer"] == orders[each["id"]] for each in (*tasks["train"], *tasks["validation"]))
    # A teacher in haste, who looks up each order at times: there is something to try out, and to learn from rewards.
    looks = Counter(each["messages"][1]["content"] for each in tasks["demonstrations"] if "tool_calls" in str(each))
    assert looks == dict.fromkeys(shown, 1)
    assert len(tasks["demonstrations"]) == 2 * len(shown)
    # Imitation alone gets the patient one.
    init(tmp_path / "b", "--algorithm", "sft")
    patient = (tmp_path / "b/tasks/demonstrations.jsonl").read_text().splitlines()
    assert all("tool_calls" in line for line in patient)


def test_all_files_that_exist_are_named_at_once_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    for name in ("agent.py", "tasks/train.jsonl"):
        (tmp_path / name).write_text("mine\n")
    (tmp_path / "grader.py").symlink_to("elsewhere.py")

    status, said = init(tmp_path)

    assert status == Exit.CONFLICT
    for name in ("agent.py", "tasks/train.jsonl", "grader.py"):
        assert f"{tmp_path / name} exists" in said
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["agent.py", "grader.py", "tasks", "train.jsonl"]
    assert (tmp_path / "agent.py").read_text() == "mine\n"


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "train.toml").write_text("mine\n")

    status, said = init(tmp_path, "--from", "none.py", "--framework", "node")

    assert status == Exit.USAGE
    assert "give --framework or --from, not both" in said
    assert f"--from none.py: there is no file {tmp_path / 'none.py'}" in said
    assert f"{tmp_path / 'train.toml'} exists" in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.toml"]


APP = """
import os

def _helper(task): ...
def load(path, mode): ...
async def answer(task, context=None):
    return await client.create(model="gpt-4.1-mini")
def other(task): ...
"""


def test_an_app_becomes_the_agent_unchanged_with_the_model_that_it_asks_for(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)

    assert init(tmp_path, "--from", "app.py")[0] == Exit.OK

    config = load_train_config(tmp_path / "train.toml")
    assert (config.agent.python, config.policy.name) == ("app.py:answer", "gpt-4.1-mini")
    assert (tmp_path / "app.py").read_text() == APP
    assert not (tmp_path / "agent.py").exists()


@pytest.mark.parametrize(
    ("file", "text", "target", "entry"),
    [
        ("app.py", APP, "app.py:other", 'python = "app.py:other"'),
        ("app.py", "def go(task): ...\n", "app.py", 'python = "app.py:go"'),
        ("app.py", "if __name__ == '__main__':\n    print(1)\n", "app.py", 'command = ["python", "app.py"]'),
        ("src/app.mjs", "", "src/app.mjs", 'command = ["node", "src/app.mjs"]'),
    ],
)
def test_how_an_app_is_started_is_seen_in_its_file(
    tmp_path: Path, file: str, text: str, target: str, entry: str
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)

    assert agent_from(target, tmp_path).entry == entry


@pytest.mark.parametrize(
    ("text", "target", "said"),
    [
        ("def f(task): ...\ndef g(task): ...\n", "app.py", "as app.py:NAME; it has f, g"),
        ("x = 1\n", "app.py", "it has none"),
        ("def f(task): ...\n", "app.py:g", "has no function 'g' of one argument; it has f"),
        ("def f(:\n", "app.py", "not valid Python: line 1"),
        ("", "app.rb", "there is no file"),
        ("", "../app.py", "there is no file"),
    ],
)
def test_an_app_that_does_not_say_what_to_call_is_refused_with_what_it_has(
    tmp_path: Path, text: str, target: str, said: str
) -> None:
    (tmp_path / "app.py").write_text(text)

    with pytest.raises(NotAnAgent) as refused:
        agent_from(target, tmp_path)

    assert said in str(refused.value)


def test_the_tiny_model_writes_whatever_the_demonstrations_say(tmp_path: Path) -> None:
    init(tmp_path)
    names: dict[str, object] = {"__file__": str(tmp_path / "make_model.py"), "__name__": "make_model"}
    exec(compile((tmp_path / "make_model.py").read_text(), "make_model.py", "exec"), names)
    names["build"](str(tmp_path / "model"), seed=3)  # type: ignore[operator]

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    demonstrations = (tmp_path / "tasks/demonstrations.jsonl").read_text().splitlines()
    for line in demonstrations:
        text = tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False)
        pieces = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        assert "<|unknown|>" not in pieces.tokens
        assert "".join(pieces.tokens) == text
