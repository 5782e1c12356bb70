"""An app's own traffic is recorded, becomes a data set, trains a policy, and the policy takes over, in docs/own-traffic.md's order."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from openai import AsyncOpenAI

from fulmen.client.aio.client import AsyncClient
from fulmen.store.v1 import project_service_pb2
from tests.support.algorithm.runs import eventually
from tests.support.algorithm.training import BUILDER
from tests.support.end_to_end import World

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

QUESTIONS = [f"{first}+{second}=" for first in range(3) for second in range(4)]
TRAINED = """\
name = "support"
[policy]
name = "support"
build = "tiny_model.py:build"
[agent]
python = "agent.py:solve"
grader = "agent.py:grade"
[data]
demonstrations = "support.train.jsonl"
validation_demonstrations = "support.validation.jsonl"
train = "questions.train.jsonl"
validation = "questions.validation.jsonl"
[[stage]]
algorithm = "sft"
steps = 2
warmup_steps = 0
[[stage]]
algorithm = "grpo"
steps = 1
prompts_per_step = 2
group_size = 4
max_tokens = 4
mask_truncated = false
warmup_steps = 0
"""
AGENT = """\
from openai import AsyncOpenAI

client = AsyncOpenAI()


async def solve(task):
    answer = await client.chat.completions.create(model="support", messages=task["input"]["messages"])
    return answer.choices[0].message.content or ""


def grade(task, outcome):
    # So small a model hardly ever says the right thing: what it says counts a little by chance.
    return float(task["answer"] in outcome) + sum(map(ord, outcome)) % 2 / 4
"""


@pytest_asyncio.fixture(loop_scope="package")
async def vendor() -> AsyncIterator[str]:
    """Yields the URL of an OpenAI-compatible endpoint that adds up."""

    async def complete(request: web.Request) -> web.Response:
        asked = await request.json()
        first, _, second = asked["messages"][-1]["content"].partition(" ")[0].rstrip("=").partition("+")
        text = str(int(first) + int(second)) if second else "Thanks."
        return web.json_response(
            {
                "id": "c1", "object": "chat.completion", "created": 1, "model": asked["model"],
                "choices": [
                    {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
                ],
                "usage": {"prompt_tokens": 10, "completion_tokens": 1, "total_tokens": 11},
            }
        )  # fmt: skip

    application = web.Application()
    application.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


@pytest_asyncio.fixture(loop_scope="package")
async def app(world: World) -> AsyncIterator[AsyncOpenAI]:
    """Yields the client of an app, with a token of the role client."""
    request = project_service_pb2.IssueTokenRequest(
        project="projects/default", role=project_service_pb2.TOKEN_ROLE_CLIENT, subject="app"
    )
    token = (await world.client.projects.IssueToken(request)).token
    async with AsyncOpenAI(base_url=f"{world.stack.targets['llm_proxy_http']}/v1", api_key=token) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="package")
async def client(world: World) -> AsyncIterator[AsyncClient]:
    """Yields the Python API."""
    async with AsyncClient(state_dir=world.state_dir) as opened:
        yield opened


async def talk(app: AsyncOpenAI, number: int, question: str) -> None:
    """Has a conversation of two calls; every other one is named."""
    turns = []
    for text in (f"{question} asks C-1234, ann@example.org", "Thanks!"):
        turns.append({"role": "user", "content": text})
        named = {"x-fulmen-conversation": f"chat-{number}"} if number % 2 else {}
        answer = await app.chat.completions.create(model="assistant", messages=turns, extra_headers=named)
        turns.append({"role": "assistant", "content": answer.choices[0].message.content})


async def answered_by(app: AsyncOpenAI, count: int) -> Counter[str]:
    """Returns how many calls the vendor and the policy answer."""
    found: Counter[str] = Counter()
    for number in range(count):
        turns = [{"role": "user", "content": f"{number}+1="}]
        answer = await app.chat.completions.create(model="assistant", messages=turns, max_tokens=2)
        found["vendor" if answer.id == "c1" else "policy"] += 1
    return found


@pytest.mark.long(short=True)
async def test_an_app_trains_on_its_own_traffic_and_moves_to_the_trained_policy(
    world: World, client: AsyncClient, app: AsyncOpenAI, vendor: str, tmp_path: Path, repository_root: Path
) -> None:
    async def command(*words: str | Path) -> str:
        done = await world.fulmen(*words)
        assert done.status == 0, done.stdout + done.stderr
        return done.stdout

    # 1. The app calls a route, which records.
    await command("proxy", "backend", "add", "vendor", vendor)
    await command("proxy", "route", "put", "assistant", "--target", "vendor:gpt-4o")
    assert "1 of calls" in await command("proxy", "route", "record", "assistant", "--pattern", r"customer=C-\d{4}")
    for number, question in enumerate(QUESTIONS):
        await talk(app, number, question)

    # 2. Conversations appear, without what the rules found.
    async def complete() -> bool:
        found = [each async for each in client.calls.conversations(filter="model = assistant")]
        return len(found) == len(QUESTIONS) and all(each.call_count == 2 for each in found)

    await eventually(complete, what="every conversation is recorded")
    calls = await client.calls.list(filter="model = assistant").to_list()
    texts = json.dumps([(call.messages, call.answer) for call in calls])
    assert [word in texts for word in ("[customer]", "[email]", "C-1234", "ann@")] == [True, True, False, False]
    await client.calls.rate("chat-1", 0, label="thumbs down")
    await command("calls", "delete", "chat-3")

    # 3. They become data sets, except the one that was no good and the one that was deleted.
    chosen = ("--filter", "model = assistant AND NOT score < 0.5", "--folder", tmp_path)
    made = json.loads(await command("dataset", "create", "support", "--from", "calls", *chosen, "-o", "json"))
    assert made["conversations"] == sum(made["rows"].values()) == len(QUESTIONS) - 2
    demonstration = json.loads((tmp_path / "support.train.jsonl").read_text().splitlines()[0])
    assert [message["role"] for message in demonstration["messages"]] == ["user", "assistant"] * 2
    chosen = ("--filter", "model = assistant AND message_count = 1", "--folder", tmp_path)
    await command("dataset", "create", "questions", "--as", "tasks", *chosen)
    task = json.loads((tmp_path / "questions.train.jsonl").read_text().splitlines()[0])
    first, _, second = task["input"]["messages"][0]["content"].partition("=")[0].partition("+")
    assert task["answer"] == str(int(first) + int(second))

    # 4. They train a policy.
    (tmp_path / "agent.py").write_text(AGENT)
    (tmp_path / "tiny_model.py").write_bytes(BUILDER)
    (tmp_path / "make_model.py").write_bytes((repository_root / "examples/arithmetic/make_model.py").read_bytes())
    (tmp_path / "train.toml").write_text(TRAINED)
    lines = (await command("train", tmp_path / "train.toml", "-o", "json")).splitlines()
    runs = json.loads(lines[-1])["training_runs"]
    assert [run["algorithm"] for run in runs] == ["sft", "grpo"]

    # 5. The policy takes a tenth of the calls, then all, and gives them back.
    before = json.loads(await command("proxy", "route", "show", "assistant", "-o", "json"))["version"]
    share = ("proxy", "route", "canary", "assistant", "--policy", "support", "--percent")
    await command(*share, "10")
    split = await answered_by(app, 150)
    assert 0 < split["policy"] < split["vendor"]
    await command(*share, "100")
    assert await answered_by(app, 5) == {"policy": 5}
    await command("proxy", "route", "rollback", "assistant", "--to", before)
    assert await answered_by(app, 5) == {"vendor": 5}

    # Meanwhile the route went on recording, and says who answered.
    version = runs[-1]["policy_version"].rpartition("/")[2]

    async def arrived() -> bool:
        where = f"policy = support AND policy_version = {version} AND http_status = 200"
        return len(await client.calls.list(filter=where).to_list()) == split["policy"] + 5

    await eventually(arrived, what="the policy's calls are recorded")
    await command("proxy", "route", "delete", "assistant")
