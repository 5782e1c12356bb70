"""`fulmen agent check`, as a newcomer types it: real processes, the real runner, models that really are asked."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fulmen_cli.exits import Exit
from fulmen_cli.main import app
from tests.support.cli.command_runner import CliRunner
from tests.support.cli.screens import check_screen
from tests.support.cli.terminal import terminal_program
from tests.support.runner.wheels import wheel

AGENT = """
import json, os
from urllib.request import Request, urlopen
import fulmen.emit

def _ask(task):
    body = {"model": "mine", "messages": [{"role": "user", "content": task["question"]}]}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urlopen(Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def silent(task):
    return _ask(task)

async def scored(task, context):
    from openai import AsyncOpenAI  # takes most of a second: the others do without

    turns = [{"role": "user", "content": task["question"]}]
    stream = await AsyncOpenAI().chat.completions.create(model="mine", messages=turns, stream=True)
    async for _ in stream:
        pass
    fulmen.emit.emit_reward(0.25, dimension="short")
    return 0.5

def walks(task):
    print("walking")
    yield 0.1
    _ask(task)
    yield 0.2

def breaks(task):
    raise ValueError("no good")

def stops(task):
    found = 41
    breakpoint()
    return found
"""
CURL = 'curl -s "$OPENAI_BASE_URL/chat/completions" -d @body.json >&2 -H "authorization: Bearer '
COMMAND = f'{CURL}other"; {CURL}$OPENAI_API_KEY"; cat; echo; echo 0.75'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("agent")
    (path / "agent.py").write_text(AGENT)
    (path / "grader.py").write_text(
        "def grade(task, outcome):\n    return {'right': float(outcome == task['answer'])}\n"
    )
    (path / "body.json").write_text('{"model": "mine", "messages": [{"role": "user", "content": "one two"}]}')
    (path / "agent.toml").write_text('[agent]\npython = "agent.py:scored"\n')
    tasks = [{"question": f"q {n}", "answer": f"q {n}"} for n in range(3)]
    (path / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (path / "train.toml").write_text(
        'name = "x"\n[policy]\nname = "mine"\n[agent]\npython = "agent.py:silent"\ngrader = "grader.py:grade"\n'
        '[data]\ntrain = "train.jsonl"\n[[stage]]\nalgorithm = "grpo"\n'
    )
    return path


def check(folder: Path, *arguments: str, fake: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fulmen_cli", "agent", "check", *(["--fake-model"] if fake else []), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def document(folder: Path, *arguments: str, fake: bool = True) -> dict[str, Any]:
    done = check(folder, "--output", "json", *arguments, fake=fake)
    assert done.stdout, done.stderr
    return json.loads(done.stdout)[0]


def test_a_configuration_is_checked_on_one_of_its_tasks_with_its_grader(folder: Path) -> None:
    done = check(folder, "train.toml", "--task", "2", "--times", "2")

    assert done.returncode == 0, done.stderr
    check_screen("agent-check", done.stdout, durations=True)


def test_a_configuration_of_an_agent_and_no_more_is_enough(folder: Path) -> None:
    found = document(folder, "agent.toml", "--input", '{"question": "a b c"}')

    assert [(each["dimension"], each["value"]) for each in found["rewards"]] == [("short", 0.25), ("reward", 0.5)]
    assert [(call["prompt_tokens"], call["completion_tokens"]) for call in found["model_calls"]] == [(3, 3)]
    assert found["failure"] is None


def test_an_agents_secrets_come_from_the_shell_and_a_packed_agent_names_what_stays_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".env").write_text("WEATHER_KEY=of the file\n")
    (tmp_path / "run.sh").write_text('echo "said $WEATHER_KEY"; echo 0.5\n')
    (tmp_path / "agent.toml").write_text('[agent]\ncommand = ["sh", "run.sh"]\nsecrets = ["WEATHER_KEY"]\n')
    missing = check(tmp_path, "agent.toml", "--input", "x")
    assert (missing.returncode, "WEATHER_KEY are not set in this shell" in missing.stderr) == (Exit.USAGE, True)
    monkeypatch.setenv("WEATHER_KEY", "sunny-and-warm")
    done = check(tmp_path, "agent.toml", "--input", "x")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "left out, because they may contain secrets: .env" in done.stdout
    assert "said [masked]" in done.stdout
    assert "sunny-and-warm" not in done.stdout + done.stderr


def test_a_generator_is_walked_step_by_step(folder: Path) -> None:
    found = document(folder, "agent.py:walks", "--input", '{"question": "a"}')

    assert [(each["step"], each["value"]) for each in found["rewards"]] == [(0, 0.1), (1, 0.2)]
    assert len(found["model_calls"]) == 1


def test_an_agent_without_a_reward_fails_and_gets_a_hint(folder: Path) -> None:
    done = check(folder, "agent.py:silent", "--input", '{"question": "a"}')

    assert done.returncode == 1
    check_screen("agent-check-no-reward", done.stdout, durations=True)


def test_what_an_agent_raises_is_shown_without_frames_of_others(folder: Path) -> None:
    found = document(folder, "agent.py:breaks", "--input", "{}")

    assert found["failure"]["kind"] == "AGENT_ERROR"
    assert "ValueError: no good" in found["failure"]["message"]
    assert "concurrent/futures" not in found["failure"]["message"]


def test_a_command_is_given_input_key_and_models_and_a_wrong_key_is_explained(folder: Path) -> None:
    found = document(folder, "--command", "--input", "hello", "--", "bash", "-c", COMMAND)

    assert found["rewards"] == [{"dimension": "reward", "step": None, "span_id": "", "value": 0.75}]
    assert found["outcome"].startswith("hello")
    assert [call["prompt_tokens"] for call in found["model_calls"]] == [2]
    assert "1 model call did not use the attempt's key" in found["hints"][0]


def test_the_end_of_standard_error_says_why_a_command_failed(folder: Path) -> None:
    done = check(folder, "--command", "--input", "x", "--", "bash", "-c", "echo why >&2; exit 3")

    assert done.returncode == 1
    check_screen("agent-check-command-failed", done.stdout, durations=True)


def test_what_is_missing_is_named_with_the_right_exit_status(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    screen = ""
    for arguments, code in (
        (["agent.py:silent"], Exit.USAGE),
        ([], Exit.USAGE),
        (["train.toml", "--task", "3"], Exit.NOT_FOUND),
        (["none.py:f", "--input", "1"], Exit.NOT_FOUND),
        (["none.toml"], Exit.USAGE),
        (["grader.py"], Exit.USAGE),
        (["agent.py:silent", "--input", "1", "--task", "1"], Exit.USAGE),
        (["agent.toml"], Exit.USAGE),
        (["train.toml"], Exit.USAGE),
    ):
        done = CliRunner().invoke(app, ["agent", "check", *arguments])
        assert done.exit_code == code
        screen += f"$ fulmen agent check {' '.join(arguments)}\n{done.stderr}"

    check_screen("agent-check-errors", screen, folder=str(folder))


class _Vendor(BaseHTTPRequestHandler):
    """Knows one key and one model."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        good = self.headers["Authorization"] == "Bearer real-key" and self.path == "/api/v1/chat/completions"
        status = 200 if good and body["model"] == "big" else 401
        choice = {"index": 0, "message": {"role": "assistant", "content": "from afar"}, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 0, "model": "big", "choices": [choice]}
        answer["usage"] = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
        content = json.dumps(answer if status == 200 else {"error": {"message": "wrong key"}}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture(scope="module")
def vendor() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Vendor)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/api/v1"
    server.shutdown()
    server.server_close()


def test_a_vendor_gets_the_real_key_and_model_and_the_agent_neither(folder: Path, vendor: str) -> None:
    options = ["train.toml", "--model-url", vendor, "--model", "big"]
    found = document(folder, *options, "--api-key", "real-key", fake=False)
    refused = document(folder, *options, "--api-key", "other-key", fake=False)

    assert found["outcome"] == "from afar"
    assert found["model_calls"][0]["prompt_tokens"] == 7
    assert "real-key" not in json.dumps(found)
    assert refused["failure"]["kind"] == "AGENT_ERROR"
    assert any("refused the key" in hint for hint in refused["hints"])


def test_a_breakpoint_in_the_agent_has_the_terminal(folder: Path) -> None:
    command = [sys.executable, "-m", "fulmen_cli", "agent", "check", "agent.py:stops", "--input", "1", "--fake-model"]
    with terminal_program(command, folder=folder) as program:
        program.read_until("(Pdb)")
        program.write("p found + 1\n")
        assert "42" in program.read_until("(Pdb)")
        program.write("continue\n")
        program.read_until("succeeded")
        assert program.exit_status() == 0


@pytest.mark.parametrize("own", ["requirements", "venv"])
def test_an_agent_is_checked_with_packages_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    packed = wheel(tmp_path / "packages", "of_its_own", "7.0")
    monkeypatch.setenv("FULMEN_RUNNER_PACKAGE_INDEX_URL", "off")
    monkeypatch.setenv("FULMEN_RUNNER_PACKAGE_FOLDERS", str(tmp_path / "packages"))
    monkeypatch.setenv("FULMEN_RUNNER_VENVS_DIR", str(tmp_path / "venvs"))
    project = tmp_path / "project"
    project.mkdir()
    (project / "agent.py").write_text("import of_its_own\ndef solve(task):\n    return float(of_its_own.VERSION)\n")
    (project / "requirements.txt").write_text("of-its-own==7.0\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(project / ".venv")], check=True)
    [site] = (project / ".venv").glob("lib/python*/site-packages")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(packed), str(site)], check=True)
    value = {"requirements": "requirements.txt", "venv": ".venv"}[own]
    (project / "agent.toml").write_text(f'[agent]\npython = "agent.py:solve"\n{own} = "{value}"\n')

    found = document(project, "agent.toml", "--input", "{}")

    assert found["failure"] is None, found["failure"]
    assert [(each["dimension"], each["value"]) for each in found["rewards"]] == [("reward", 7.0)]


def test_packages_that_runners_would_refuse_are_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def solve(task):\n    return 1\n")
    (tmp_path / "requirements.txt").write_text("httpx\n-e /etc\n--index-url http://x\n")
    (tmp_path / "agent.toml").write_text(
        '[agent]\npython = "agent.py:solve"\nrequirements = "requirements.txt"\nvenv = ".venv"\n'
    )
    done = check(tmp_path, "agent.toml", "--input", "{}")
    assert done.returncode != 0
    for problem in ("line 2: '-e /etc'", "line 3: '--index-url http://x'", "there is no folder", "not both"):
        assert problem in done.stderr
