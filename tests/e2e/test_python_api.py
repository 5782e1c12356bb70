"""The Python API against the real services: its documented examples, a training, and functions as agents."""

from __future__ import annotations

import ast
import asyncio
import doctest
import importlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fulmen
from fulmen.errors import ResourceNotFound, RolloutNotFound
from fulmen_cli.exits import Exit
from tests.support.algorithm.models import small_model
from tests.support.folders import short_folder

# The first test starts the stack, and two train.
pytestmark = [pytest.mark.long(short=True), pytest.mark.timeout(600)]

# Those that are marked as not run follow a comment.
BLOCK = re.compile(r"(?<!-->\n)^```python\n(.*?)```", re.DOTALL | re.MULTILINE)
# In an order in which each has what it needs: agents before their rollouts, rollouts before their spans.
FACES = ("client", "rollouts", "spans", "resources", "runs", "trainers")
LEAST_EXAMPLES = 20


@pytest.fixture(scope="module")
def state_dir() -> Iterator[Path]:
    """Yields the state directory of a stack of this module's own: examples say what is in an empty one."""
    with short_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def client(state_dir: Path) -> Iterator[fulmen.Client]:
    with fulmen.local(state_dir) as made:
        yield made


def grade(task: Any, outcome: Any) -> float:
    return float(outcome == task["answer"])


def test_the_examples_of_docstrings_are_true(
    client: fulmen.Client, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULMEN_STATE_DIR", str(state_dir))
    told: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for face in FACES:
        module = importlib.import_module(f"fulmen.client.sync.{face}")
        examples = doctest.DocTestFinder().find(module, globs={"client": client})
        for example in sorted(examples, key=lambda each: each.lineno or 0):
            runner.run(example, out=told.append)

    assert not told, "".join(told)
    assert runner.tries > LEAST_EXAMPLES


def test_functions_are_agents_and_their_rollouts_are_waited_for(client: fulmen.Client) -> None:
    def solve(task: Any) -> Any:
        return task["input"] * 2

    agent = client.publish_agent("doubling", solve, reward=grade)
    again = client.publish_agent("doubling", solve, reward=grade)
    created = client.rollouts.create(agent, [{"input": 1, "answer": 2}, {"input": 1, "answer": 3}], group_id="pair")
    done = client.rollouts.wait(created, timeout_s=60)

    assert again == agent
    assert [each.reward for each in done] == [1.0, 0.0]
    assert [each.task["answer"] for each in done] == [2, 3]
    group = next(group for group in client.rollouts.stream() if group.id == "pair")
    assert sorted(group.rollouts, key=lambda each: each.name) == sorted(done, key=lambda each: each.name)


def test_a_command_and_a_path_are_agents_too(client: fulmen.Client, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text("def solve(task):\n    return 1.0\n")
    client.publish_agent("path", f"{tmp_path}/agent.py:solve")
    client.publish_agent("words", ["sh", "-c", "echo 0.5"], folder=tmp_path)

    [one] = client.rollouts.wait(client.rollouts.create("path", {"input": 1}), timeout_s=60)
    [half] = client.rollouts.wait(client.rollouts.create("words", {"input": 1}), timeout_s=60)

    assert (one.reward, half.reward) == (1.0, 0.5)


def test_an_agent_that_raises_says_where(client: fulmen.Client) -> None:
    def solve(task: Any) -> Any:
        return 1 / task["input"]

    client.publish_agent("dividing", solve)
    [failed] = client.rollouts.wait(client.rollouts.create("dividing", {"input": 0}), timeout_s=60)

    assert (failed.state, failed.failure) == ("failed", "agent_error")
    assert failed.attempt is not None
    assert "ZeroDivisionError" in failed.attempt.failure_message
    frame = client.rollouts.list(states=["failed"], limit=1).to_pandas()
    assert frame["failure"].tolist() == ["agent_error"]


def test_errors_are_those_of_the_catalogue(client: fulmen.Client) -> None:
    with pytest.raises(RolloutNotFound):
        client.rollouts.get("0192f0c1-7a6e-7c53-9f3e-0123456789ab")
    with pytest.raises(ResourceNotFound):
        client.rollouts.create("nobody", {"input": 1})
    with pytest.raises(ValueError, match="known: train, validation, test"):
        client.rollouts.create("doubling", {"input": 1}, mode="training")


def test_one_connection_serves_scripts_and_any_event_loop(client: fulmen.Client) -> None:
    async def counted() -> int:
        stats, again = await asyncio.gather(client.aio.queue(), client.aio.queue())
        return stats.runner_count + again.runner_count

    assert client.queue().runner_count == 1
    assert asyncio.run(counted()) == 2
    assert asyncio.run(counted()) == 2


def test_a_training_is_iterated_over_step_by_step(client: fulmen.Client, repository_root: Path) -> None:
    example = repository_root / "examples/arithmetic"
    run = client.train(
        agent=f"{example}/agent.py:solve",
        reward=f"{example}/grader.py:grade",
        tasks=example / "tasks/train.jsonl",
        validation=[{"id": "1", "input": {"question": "2+3="}, "answer": "5"}],
        base=f"{example}/make_model.py:build",
        algorithm=fulmen.GRPO(
            steps=2, prompts_per_step=4, group_size=2, minibatches=1, refill_limit=0, validate_every=1
        ),
        name="iterated",
        policy="arithmetic",
    )
    steps = list(run)
    model = run.model()

    assert [step.number for step in steps] == [0, 1, 2]
    assert all(step.reward is not None for step in steps[1:])
    assert steps[-1].validation is not None
    assert run.state == "succeeded"
    assert (model.policy, Path(model.path).is_dir()) == ("arithmetic", True)
    assert len(run.to_pandas()) == 3
    assert {each.mode for each in run.rollouts(limit=50)} <= {"train", "validation"}
    assert client.runs.get(run.id).results == run.results
    assert "<svg" in run._repr_html_()


def test_a_training_of_several_stages_ends_with_the_last_and_each_is_iterated_over(
    client: fulmen.Client, repository_root: Path
) -> None:
    example = repository_root / "examples/arithmetic"
    stage = fulmen.GRPO(steps=1, prompts_per_step=4, group_size=2, minibatches=1, refill_limit=0)
    last = client.train(
        agent=f"{example}/agent.py:solve",
        reward=f"{example}/grader.py:grade",
        tasks=example / "tasks/train.jsonl",
        base=f"{example}/make_model.py:build",
        algorithm=[stage, stage],
        name="staged",
        policy="arithmetic",
    )
    first, second = last.stages()

    assert second.id == last.id
    assert [[step.number for step in run] for run in (first, second)] == [[1], [1]]
    assert last.wait().state == "succeeded"
    assert last.proto.policy.version == first.policy_version


def test_the_trained_model_is_served_for_a_time_and_answers_the_call_that_is_shown(
    client: fulmen.Client, state_dir: Path
) -> None:
    def serve(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fulmen_cli", "model", "serve", *options, "--state-dir", str(state_dir)]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)

    shown = serve("arithmetic", "--hours", "0.5")
    assert shown.returncode == 0, shown.stderr
    called = subprocess.run(
        ["sh", "-c", shown.stdout[shown.stdout.index("curl ") :]],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(called.stdout)["choices"][0]["message"]["role"] == "assistant", called.stdout

    # Again: the same run holds it, and ends when it is asked to.
    held = json.loads(serve("arithmetic", "--output", "json").stdout)
    assert held["run"].rpartition("/")[2] in shown.stdout
    assert client.runs.get(held["run"]).state == "running"
    assert serve("arithmetic", "--stop").returncode == 0
    assert serve("arithmetic", "--stop").returncode == Exit.NOT_FOUND
    assert client.runs.get(held["run"]).state == "cancelled"


def test_a_failed_run_ends_the_iteration_with_why(client: fulmen.Client, tmp_path: Path) -> None:
    run = client.train(
        agent=lambda task: 1.0,
        tasks=[{"input": 1}],
        base=broken_model,
        algorithm=fulmen.GRPO(steps=1),
        name="broken",
    )

    with pytest.raises(fulmen.RunFailed, match=r"(?s)broken-.* ended as failed: .*no weights here") as raised:
        list(run)
    assert raised.value.state == "failed"


def broken_model(output_directory: str, *, seed: int) -> None:
    raise RuntimeError("no weights here")


def test_every_problem_of_a_training_is_told_and_nothing_is_created(client: fulmen.Client) -> None:
    before = [run.id for run in client.runs.list()]
    with pytest.raises(fulmen.ConfigError) as raised:
        client.train(
            agent=lambda task: 1.0,
            tasks=[{"input": 1}],
            algorithm=fulmen.Algorithm("grpo", stepz=1, learning_rate="fast"),
            base=broken_model,
        )

    assert "stepz" in str(raised.value)
    assert "learning_rate" in str(raised.value)
    assert [run.id for run in client.runs.list()] == before


def test_versions_of_a_trainer_are_served_like_those_of_a_run(client: fulmen.Client, repository_root: Path) -> None:
    demonstration = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    base = small_model(Path(tempfile.mkdtemp()) / "tiny")
    for lora, rate in ((None, 1e-2), (fulmen.Lora(rank=4), 1e-2)):
        policy = "shown-adapters" if lora else "shown"
        with client.trainer(client.models.upload(base), policy=policy, lora=lora, learning_rate=rate) as trainer:
            for _ in range(30):
                trainer.forward_backward([trainer.render(demonstration)])
                trainer.optim_step()
            said = trainer.sample(demonstration[:1], max_tokens=2, temperature=0)[0].text
            version = trainer.publish()

        async def solve(task: Any, policy: str = policy) -> str:
            from openai import AsyncOpenAI

            messages = [{"role": "user", "content": task["input"]}]
            asked = await AsyncOpenAI().chat.completions.create(
                model=policy, messages=messages, max_tokens=2, temperature=0
            )
            return asked.choices[0].message.content or ""

        run = client.train(
            agent=solve,
            reward=lambda task, outcome: float(outcome == task["answer"]),
            algorithm=fulmen.Evaluate(temperature=0.0),
            base=version,
            test=[{"input": "1+1=", "answer": said}],
        )
        list(run)
        assert run.refresh().state == "succeeded", run.failure_message
        assert run.results["test_reward_mean"] == 1.0


def test_the_examples_of_the_page_run(
    client: fulmen.Client, state_dir: Path, repository_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FULMEN_STATE_DIR", str(state_dir))
    monkeypatch.chdir(repository_root)
    names: dict[str, Any] = {"__name__": "__main__"}
    page = (repository_root / "docs/python.md").read_text(encoding="utf-8")
    for block in BLOCK.findall(page.replace('"./sums"', repr(str(tmp_path / "sums")))):
        code = compile(block, "docs/python.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        ran = eval(code, names)
        if inspect.iscoroutine(ran):
            asyncio.run(ran)

    assert names["run"].state == "succeeded"
    assert "| version | sums@" in (tmp_path / "sums/README.md").read_text(encoding="utf-8")
