"""What becomes of an attempt, whatever its agent does: against the double and against the real store."""

from __future__ import annotations

import json

import pytest

from tests.support.runner.fixtures import PublishAgent, StartRunner
from tests.support.runner.harness import rollouts_of
from tests.support.runner.proxy_double import ProxyDouble
from tests.support.runner.stores import Store

AGENT = """
import asyncio, math, os, sys, time
import helper
from fulmen.emit import emit_reward

async def number(task): return 0.5
def blocking(task): return float(os.environ["FROM_SPEC"])
async def text(task): return "an answer to " + task["question"]
async def nothing(task): return None
async def raises(task): raise RuntimeError("boom " + helper.WORD)
async def exits(task): sys.exit(3)
async def not_a_number(task): return math.nan
async def sleeps(task): await asyncio.sleep(3600)
def hangs(task): time.sleep(task["sleep_s"])
async def stubborn(task):
    while True:
        try: await asyncio.sleep(3600)
        except asyncio.CancelledError: return 1.0
async def emits(task):
    emit_reward(1, dimension="format", step=0)
    await asyncio.to_thread(emit_reward, 2.5)
async def with_context(task, context):
    assert context.environment["FULMEN_ROLLOUT"] == context.rollout and 0 < context.remaining_s <= 60
    return float(context.attempt_number)
class Callable:
    async def __call__(self, task): return 4
instance = Callable()
async def cancels_itself(task): asyncio.current_task().cancel(); await asyncio.sleep(0)

def grade(task, outcome): return {"exact": outcome == "an answer to why", "length": len(outcome)}
async def grade_async(task, outcome): return 0.25
def grade_badly(task, outcome): return "good"
def grade_raises(task, outcome): raise ValueError("no")
"""
FILES = {"agent.py": AGENT, "helper.py": "WORD = 'helped'\n"}


async def run_one(
    store: Store, start_runner: StartRunner, agent: str, task: object = None, **policy: object
) -> list[object]:
    await start_runner()
    [name] = await store.create(rollouts_of(agent, [task or {"question": "why"}], **policy))
    return (await store.ended([name]))[name]


@pytest.mark.parametrize(
    ("target", "rewards"),
    [
        ("number", {("reward", None): 0.5}),
        ("blocking", {("reward", None): 2.0}),
        ("emits", {("format", 0): 1.0, ("reward", None): 2.5}),
        ("with_context", {("reward", None): 1.0}),
        ("instance", {("reward", None): 4.0}),
    ],
)
async def test_rewards_reach_the_store(
    store: Store, start_runner: StartRunner, publish_agent: PublishAgent, target: str, rewards: dict[object, float]
) -> None:
    agent = await publish_agent(FILES, python=f"agent.py:{target}", environment={"FROM_SPEC": "2.0"})
    [ended] = await run_one(store, start_runner, agent)
    assert (ended.kind, ended.rewards) == ("", rewards)


@pytest.mark.parametrize(
    ("target", "kind", "says"),
    [
        ("raises", "AGENT_ERROR", "RuntimeError: boom helped"),
        ("exits", "AGENT_ERROR", "SystemExit: 3"),
        ("not_a_number", "AGENT_ERROR", "not a finite number"),
        ("cancels_itself", "AGENT_ERROR", "cancelled itself"),
        ("absent", "AGENT_ERROR", "no callable 'absent'"),
        ("nothing", "REWARD_MISSING", "neither"),
        ("text", "REWARD_MISSING", "neither"),
    ],
)
async def test_failures_are_typed_and_explained(
    store: Store, start_runner: StartRunner, publish_agent: PublishAgent, target: str, kind: str, says: str
) -> None:
    agent = await publish_agent(FILES, python=f"agent.py:{target}")
    [ended] = await run_one(store, start_runner, agent)
    assert (ended.kind, ended.rewards) == (kind, {})
    assert says in ended.message


@pytest.mark.parametrize("target", ["sleeps", "stubborn", "hangs"])
async def test_an_attempt_past_its_deadline_ends_as_timeout(
    store: Store, start_runner: StartRunner, publish_agent: PublishAgent, target: str
) -> None:
    agent = await publish_agent(FILES, python=f"agent.py:{target}")
    [ended] = await run_one(store, start_runner, agent, {"sleep_s": 3600}, timeout_s=2)
    assert ended.kind == "TIMEOUT"


@pytest.mark.parametrize(
    ("grader", "kind", "rewards"),
    [
        ("grade", "", {("exact", None): 1.0, ("length", None): 16.0}),
        ("grade_async", "", {("reward", None): 0.25}),
        ("grade_badly", "AGENT_ERROR", {}),
        ("grade_raises", "AGENT_ERROR", {}),
        ("nothing", "AGENT_ERROR", {}),
    ],
)
async def test_a_grader_scores_the_outcome(
    store: Store,
    start_runner: StartRunner,
    publish_agent: PublishAgent,
    grader: str,
    kind: str,
    rewards: dict[object, float],
) -> None:
    agent = await publish_agent(FILES, python="agent.py:text", python_grader=f"agent.py:{grader}")
    [ended] = await run_one(store, start_runner, agent)
    assert (ended.kind, ended.rewards) == (kind, rewards)
    if not kind:
        assert ended.output == b"an answer to why"


async def test_a_running_rollout_is_cancelled(
    store: Store, start_runner: StartRunner, publish_agent: PublishAgent, proxy: ProxyDouble
) -> None:
    agent = await publish_agent(FILES, python="agent.py:sleeps")
    runner = await start_runner()
    [name] = await store.create(rollouts_of(agent, [{}]))
    await runner.logged("attempt_started")
    await store.cancel([name])
    assert [ended.kind for ended in (await store.ended([name]))[name]] == ["CANCELLED"]


async def test_failures_of_infrastructure_are_tried_again_and_never_a_reward(
    store: Store, start_runner: StartRunner, publish_agent: PublishAgent, proxy: ProxyDouble
) -> None:
    proxy.infra_failures = 1
    agent = await publish_agent(FILES, python="agent.py:raises")
    ended = await run_one(store, start_runner, agent, max_attempts=2)
    assert [(e.kind, e.rewards) for e in ended] == [("INFRA", {}), ("INFRA", {})]
    assert "RuntimeError: boom helped" in ended[0].message


async def test_a_success_in_spite_of_failed_calls_is_a_success(
    store: Store, start_runner: StartRunner, publish_agent: PublishAgent, proxy: ProxyDouble
) -> None:
    proxy.infra_failures = 1
    agent = await publish_agent(FILES, python="agent.py:number")
    [ended] = await run_one(store, start_runner, agent)
    assert ended.kind == ""


async def test_spans_that_are_not_confirmed_make_it_infra(
    store: Store, start_runner: StartRunner, publish_agent: PublishAgent, proxy: ProxyDouble
) -> None:
    proxy.confirming = False
    agent = await publish_agent(FILES, python="agent.py:number")
    await start_runner(flush_s=0.5)
    [name] = await store.create(rollouts_of(agent, [{}], max_attempts=1))
    [ended] = (await store.ended([name]))[name]
    assert (ended.kind, ended.rewards) == ("INFRA", {})


async def test_two_versions_of_an_agent_keep_their_modules_apart(
    store: Store, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    code = "import helper\nasync def solve(task):\n    return helper.VALUE\n"
    first = await publish_agent({"agent.py": code, "helper.py": "VALUE = 1"}, python="agent.py:solve")
    second = await publish_agent({"agent.py": code, "helper.py": "VALUE = 2"}, python="agent.py:solve")
    await start_runner()
    names = []
    for agent in (first, second, first):
        [name] = await store.create(rollouts_of(agent, [{}]))
        names.append((await store.ended([name]))[name][0].rewards)
    assert [rewards[("reward", None)] for rewards in names] == [1.0, 2.0, 1.0]


async def test_input_that_is_not_json_is_the_tasks_fault(
    store: Store, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    agent = await publish_agent(FILES, python="agent.py:number")
    await start_runner()
    [rollout] = rollouts_of(agent, [{}])
    rollout.input = b"{"
    [name] = await store.create([rollout])
    [ended] = (await store.ended([name]))[name]
    assert ended.kind == "AGENT_ERROR"
    assert "not valid application/json" in ended.message


async def test_an_agent_that_does_not_exist_fails_its_rollouts_only(
    store: Store, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    good = await publish_agent(FILES, python="agent.py:number")
    await start_runner()
    names = await store.create(rollouts_of("resources/agent.none/versions/1", [{}]) + rollouts_of(good, [{}]))
    ended = await store.ended(names)
    assert [ended[name][0].kind for name in names] == ["AGENT_ERROR", ""]


async def test_what_an_agent_returns_is_kept_as_json(
    store: Store, start_runner: StartRunner, publish_agent: PublishAgent
) -> None:
    code = "from fulmen.emit import emit_reward\nasync def solve(task):\n    emit_reward(1)\n    return {'got': task}\n"
    agent = await publish_agent({"agent.py": code}, python="agent.py:solve")
    [ended] = await run_one(store, start_runner, agent, {"question": "why", "ü": [1, None]})
    assert json.loads(ended.output) == {"got": {"question": "why", "ü": [1, None]}}
