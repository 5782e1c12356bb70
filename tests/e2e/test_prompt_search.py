"""Algorithms other than RL over the whole stack: a prompt search, and an algorithm in one file."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web

from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, route_pb2, route_service_pb2
from fulmen.store.v1 import resource_service_pb2
from tests.support.algorithm.runs import list_rollouts
from tests.support.algorithm.training import AGENT, BUILDER
from tests.support.cli.commands import Done
from tests.support.end_to_end import World

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

KINDS = "Name one of: delivery, payment, complaint."
ALONE = "Answer with that word alone."
TINY = """\
name = "one-file"
[policy]
name = "tiny"
build = "tiny_model.py:build"
[agent]
python = "agent.py:solve"
grader = "agent.py:grade"
[data]
train = "train.jsonl"
validation = "train.jsonl"
[[stage]]
algorithm = "best_of_n"
steps = 2
prompts_per_step = 2
n = 4
max_tokens = 4
[[stage]]
algorithm = "evaluate"
samples = 3
pass_at = [1, 3]
"""

BOTH = """\
name = "both"
[policy]
name = "tiny"
build = "tiny_model.py:build"
[agent]
python = "agent.py:solve"
grader = "agent.py:grade"
[data]
train = "train.jsonl"
validation = "train.jsonl"
demonstrations = "demonstrations.jsonl"
prompt = "prompt.md"
[[stage]]
algorithm = "sft"
steps = 2
warmup_steps = 0
[[stage]]
algorithm = "apo"
steps = 1
critic = { model = "critic" }
beam_width = 1
branch_factor = 1
selection = { kind = "halving", tasks = 2 }
budget = { calls = 4 }
[[stage]]
algorithm = "grpo"
steps = 2
prompts_per_step = 2
group_size = 4
max_tokens = 4
mask_truncated = false
warmup_steps = 0
"""
PROMPTED = b"""\
from openai import AsyncOpenAI

import fulmen

client = AsyncOpenAI()


async def solve(task):
    prompt = fulmen.prompt("")
    asked = f"{len(prompt) % 10}+{task['input']['question']}"
    completion = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": asked}])
    return prompt + (completion.choices[0].message.content or "")


def grade(task, outcome):
    # What the weights sample is worth less than the better prompt, so that chance never decides the search.
    return sum(map(ord, outcome)) % 2 / 4 + outcome.startswith("Name one of")
"""


class Scripted:
    """An OpenAI-compatible endpoint: a worker that does what its prompt says, a critic, and an editor."""

    def __init__(self) -> None:
        self.questions: list[str] = []
        kinds = {}
        for line in (Path(__file__).parents[2] / "examples/prompt_tuning/tasks").glob("*.jsonl"):
            tasks = [json.loads(each) for each in line.read_text().splitlines()]
            kinds |= {task["input"]["message"]: task["kind"] for task in tasks}
        self._kinds = kinds

    def answer(self, model: str, messages: list[dict[str, str]]) -> str:
        """Answers by what it is asked alone."""
        text = messages[-1]["content"]
        if model == "worker":
            kind = next(kind for message, kind in self._kinds.items() if message in text)
            if KINDS not in text:
                return "It is a message of a customer."
            return kind if ALONE in text else f"I would call it a {kind}."
        self.questions.append(text)
        if "<criticism>" in text:
            template = text.partition("<template>\n")[2].partition("\n</template>")[0]
            criticism = text.partition("<criticism>\n")[2].partition("\n</criticism>")[0]
            return f"<prompt>\n{criticism} {template}\n</prompt>"
        template = text.partition("<template>\n")[2].partition("\n</template>")[0]
        return KINDS if KINDS not in template else ALONE

    async def complete(self, request: web.Request) -> web.Response:
        asked = await request.json()
        text = self.answer(asked["model"], asked["messages"])
        message = {"role": "assistant", "content": text}
        return web.json_response(
            {
                "id": "c1", "object": "chat.completion", "created": 1, "model": asked["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
            }
        )  # fmt: skip


@pytest_asyncio.fixture(loop_scope="package")
async def scripted(world: World) -> AsyncIterator[Scripted]:
    """Yields an endpoint that the proxy sends `worker` and `critic` to."""
    made, application = Scripted(), web.Application()
    application.router.add_post("/v1/chat/completions", made.complete)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    backend = backend_pb2.Backend(name="backends/scripted", base_url=f"http://127.0.0.1:{port}/v1")
    await world.client.backends.RegisterBackend(backend_service_pb2.RegisterBackendRequest(backend=backend))
    for model in ("worker", "critic"):
        target = route_pb2.RouteTarget(backend=backend.name, weight=100)
        route = route_pb2.Route(name=f"routes/{model}", targets=[target])
        await world.client.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))
    yield made
    await runner.cleanup()


async def test_a_prompt_gets_better_and_is_measured_on_tasks_that_the_search_has_not_seen(
    world, scripted, tmp_path, repository_root
):
    folder = shutil.copytree(repository_root / "examples/prompt_tuning", tmp_path / "agent")
    done = await world.fulmen("train", folder / "train.toml", "-o", "json", "--report-dir", tmp_path / "report")
    search, evaluation = _runs_of(done)
    assert search["results"]["validation_accuracy_before"] == 0.0
    assert search["results"]["validation_accuracy_after"] == 1.0
    best = await _resource(world, "resources/prompt.prompt-tuning/aliases/best")
    assert all(part in best.content.decode() for part in (KINDS, ALONE, "{message}"))
    assert best.parent == "resources/prompt.prompt-tuning/versions/1"
    # The second stage had the best prompt, and neither had a policy.
    assert evaluation["inputs"]["prompt"] == best.name
    assert evaluation["results"]["test_pass_at_1"] == 1.0
    assert "policy" not in search
    made = await list_rollouts(world.client, training_run=evaluation["name"])
    assert {each.resource_versions["prompt"] for each in made} == {best.name}
    # What was paid for was said in the report; nothing was asked twice.
    assert len(scripted.questions) <= 40
    report = (tmp_path / "report/report.md").read_text()
    assert "**best**" in report
    assert f"+{ALONE}" in report


@pytest.mark.long(short=True)
async def test_an_algorithm_of_one_file_trains_and_its_version_is_evaluated(world, tmp_path):
    root = Path(__file__).parents[2]
    (tmp_path / "agent.py").write_bytes(AGENT)
    (tmp_path / "tiny_model.py").write_bytes(BUILDER)
    (tmp_path / "make_model.py").write_bytes((root / "examples/arithmetic/make_model.py").read_bytes())
    tasks = [json.dumps({"input": {"question": f"{i}+{i}="}}) + "\n" for i in range(4)]
    (tmp_path / "train.jsonl").write_text("".join(tasks))
    (tmp_path / "train.toml").write_text(TINY)
    done = await world.fulmen("train", tmp_path / "train.toml", "-o", "json")
    trained, evaluated = _runs_of(done)
    assert trained["algorithm"] == "best_of_n"
    assert int(trained["step"]) == 2
    assert evaluated["policy"]["version"] == trained["policy_version"]
    assert evaluated["results"]["validation_rollouts"] == 12
    shown = {
        line[:36].strip(): line[36:]
        for line in (await world.fulmen("run", "show", trained["name"])).stdout.splitlines()
    }
    assert (shown["state"], shown["step"], shown["setting n"], shown["setting max_tokens"]) == (
        "succeeded",
        "2/2",
        "4",
        "4",
    )
    assert 0 <= evaluated["results"]["validation_pass_at_1"] <= evaluated["results"]["validation_pass_at_3"] <= 1


@pytest.mark.long(short=True)
async def test_reinforcement_learning_uses_the_prompt_that_a_search_found(world, scripted, tmp_path):
    root = Path(__file__).parents[2]
    demonstration = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    files = {
        "agent.py": PROMPTED,
        "tiny_model.py": BUILDER,
        "make_model.py": (root / "examples/arithmetic/make_model.py").read_bytes(),
        "train.jsonl": "".join(json.dumps({"input": {"question": f"{i}+{i}="}}) + "\n" for i in range(4)).encode(),
        "demonstrations.jsonl": json.dumps(demonstration).encode(),
        "prompt.md": b"Sort: {message}",
        "train.toml": BOTH.encode(),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    done = await world.fulmen("train", tmp_path / "train.toml", "-o", "json")
    imitated, searched, reinforced = _runs_of(done)
    assert searched["results"]["validation_accuracy_after"] > searched["results"]["validation_accuracy_before"]
    best = await _resource(world, "resources/prompt.both/aliases/best")
    assert best.content.decode().startswith("Name one of")
    # The search asked the weights that it found; reinforcement learning changes them, with the better prompt.
    assert reinforced["policy"]["version"] == imitated["policy_version"]
    assert reinforced["inputs"]["prompt"] == best.name
    assert int(reinforced["step"]) == 2
    made = await list_rollouts(world.client, training_run=reinforced["name"])
    assert {each.resource_versions["prompt"] for each in made} == {best.name}


def _runs_of(done: Done) -> list[dict]:
    assert done.status == 0, done.stdout + done.stderr
    return done.last_document["training_runs"]


async def _resource(world: World, name: str):
    request = resource_service_pb2.GetResourcesRequest(names=[name])
    return (await world.client.resources.GetResources(request)).resources[0]
