"""Agents that are commands, in three languages."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from tests.support.runner.fixtures import World
from tests.support.runner.harness import wait_for_exit
from tests.support.runner.stores import Ended

BASH = """
read -r line
[ "$line" = "$FULMEN_TASK" ] || { echo "stdin and FULMEN_TASK differ" >&2; exit 9; }
[ "$(cat "$1")" = "$line" ] || { echo "the task file differs" >&2; exit 9; }
[ -z "$FULMEN_RUNNER_TOKEN$FULMEN_RUNNER_SIGNING_KEY" ] || { echo "a secret leaked" >&2; exit 9; }
[ "$PWD" = "$(cd "$(dirname "$0")" && pwd)" ] || { echo "not in the bundle" >&2; exit 9; }
env | grep -E '^(FULMEN_|OPENAI_|ANTHROPIC_|OTEL_|TRACEPARENT|FROM_SPEC)' | sort >&2
echo "$FROM_SPEC"
"""
PYTHON = """
import json, os, sys, openai
task = json.load(sys.stdin)
answer = openai.OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": "who am I?"}])
print(json.dumps({"mine": answer.choices[0].message.content == f"{os.environ['FULMEN_ROLLOUT']}/attempts/1"}))
"""
NODE = """
const task = JSON.parse(require("node:fs").readFileSync(0, "utf8"));
const answer = await_(fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
  method: "POST",
  headers: { authorization: "Bearer " + process.env.OPENAI_API_KEY, "content-type": "application/json" },
  body: JSON.stringify({ model: "m", messages: [] }),
}));
async function await_(pending) {
  const said = (await (await pending).json()).choices[0].message.content;
  console.log(said === process.env.FULMEN_ROLLOUT + "/attempts/1" ? task.reward : 0);
}
"""
TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(3600)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
with open(os.environ["PID_FILE"], "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
time.sleep(float(os.environ["SLEEP_S"]))
print(1)
"""


async def run(world: World, agent: str, task: object, *, timeout_s: float = 60, **settings: object) -> Ended:
    await world.start(**settings)
    return await world.run(agent, task, timeout_s=timeout_s, max_attempts=1)


async def test_bash_gets_input_environment_and_nothing_secret(world: World) -> None:
    agent = await world.publish(
        {"run.sh": BASH}, command=("bash", "./run.sh", "{task_file}"), environment={"FROM_SPEC": "0.75"}
    )
    ended = await run(world, agent, {"question": "why"})
    assert (ended.message, ended.rewards) == ("", {("reward", None): 0.75})


async def test_python_with_the_vendors_package(world: World) -> None:
    agent = await world.publish({"agent.py": PYTHON}, command=("python", "agent.py"))
    ended = await run(world, agent, {})
    assert (ended.message, ended.rewards) == ("", {("mine", None): 1.0})


async def test_node_with_fetch(world: World) -> None:
    agent = await world.publish({"agent.js": NODE}, command=("node", "agent.js"))
    ended = await run(world, agent, {"reward": 0.5})
    assert (ended.message, ended.rewards) == ("", {("reward", None): 0.5})


async def test_the_node_example_with_its_grader(world: World, repository_root: Path) -> None:
    folder = repository_root / "examples" / "node_echo"
    files = {name: (folder / name).read_text() for name in ("agent.mjs", "grader.mjs")}
    agent = await world.publish(files, command=("node", "agent.mjs"), command_grader=("node", "grader.mjs"))
    task = {"id": "train-0", "input": {"question": "1+1="}, "answer": "2"}
    ended = await run(world, agent, task)
    assert (ended.message, ended.rewards) == ("", {("reward", None): 0.0})
    assert ended.output.decode() == ended.attempt


async def test_a_program_that_the_bundle_lacks_is_the_agents_error_with_the_remedy(world: World) -> None:
    agent = await world.publish({"agent.py": ""}, command=(".venv/bin/python", "agent.py"))
    ended = await run(world, agent, {})
    assert ended.kind == "AGENT_ERROR"
    assert "'.venv/bin/python' cannot be started: No such file or directory" in ended.message
    assert "relative to the agent's bundle" in ended.message


@pytest.mark.parametrize(
    ("sleep_s", "kind"), [pytest.param(3600, "TIMEOUT", marks=pytest.mark.long(short=True)), (0, "")]
)
async def test_the_whole_process_group_ends_with_the_attempt(
    world: World, tmp_path: Path, sleep_s: int, kind: str
) -> None:
    pid_file = tmp_path / "pids"
    agent = await world.publish(
        {"agent.py": TREE},
        command=("python", "agent.py"),
        environment={"PID_FILE": str(pid_file), "SLEEP_S": str(sleep_s)},
    )
    ended = await run(world, agent, {}, timeout_s=10 if kind else 60)
    assert ended.kind == kind
    for pid in pid_file.read_text().split():
        await wait_for_exit(int(pid))


async def test_a_flood_of_output_is_kept_to_its_end_in_bounded_memory(world: World) -> None:
    script = "head -c 50000000 /dev/zero | tr '\\0' 'x'; echo; echo 1"
    agent = await world.publish({"x": ""}, command=("bash", "-c", script), max_output_bytes=1000)
    runner = await world.start()
    process = psutil.Process(runner.pid)
    before_bytes = process.memory_info().rss
    ended = await world.run(agent, {})
    assert (ended.kind, ended.rewards) == ("", {("reward", None): 1.0})
    assert len(ended.output) <= 1000
    assert process.memory_info().rss - before_bytes < 30_000_000


async def test_large_input_is_on_standard_input_and_in_the_file_only(world: World) -> None:
    script = '[ -z "$FULMEN_TASK" ] && [ "$(wc -c)" -gt 200000 ] && cmp -s "$0" "$0" && echo 1'
    agent = await world.publish({"x": ""}, command=("bash", "-c", script, "{task_file}"))
    ended = await run(world, agent, {"text": "x" * 200_000})
    assert (ended.message, ended.rewards) == ("", {("reward", None): 1.0})


async def test_a_command_grader_scores_a_python_agent(world: World) -> None:
    files = {
        "agent.py": "async def solve(task):\n    return {'said': task['word']}\n",
        "grader.py": "import json, sys\nd = json.load(sys.stdin)\nprint('thinking')\n"
        "print(json.dumps({'exact': d['outcome']['said'] == d['task']['word']}))\n",
    }
    agent = await world.publish(files, python="agent.py:solve", command_grader=("python", "grader.py"))
    ended = await run(world, agent, {"word": "ü"})
    assert (ended.message, ended.rewards) == ("", {("exact", None): 1.0})
    assert json.loads(ended.output) == {"said": "ü"}
