"""What becomes of an attempt, whatever its agent does: against the double and against the real store."""

from __future__ import annotations

import json

from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of

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


ONE = {("reward", None): 1.0}
# agent, grader, failure kind, text of the message, rewards
OUTCOMES: list[tuple[str, str, str, str, dict[tuple[str, int | None], float]]] = [
    ("number", "", "", "", {("reward", None): 0.5}),
    ("blocking", "", "", "", {("reward", None): 2.0}),
    ("emits", "", "", "", {("format", 0): 1.0, ("reward", None): 2.5}),
    ("with_context", "", "", "", ONE),
    ("instance", "", "", "", {("reward", None): 4.0}),
    ("raises", "", "AGENT_ERROR", "RuntimeError: boom helped", {}),
    ("exits", "", "AGENT_ERROR", "SystemExit: 3", {}),
    ("not_a_number", "", "AGENT_ERROR", "not a finite number", {}),
    ("cancels_itself", "", "AGENT_ERROR", "cancelled itself", {}),
    ("absent", "", "AGENT_ERROR", "no callable 'absent'", {}),
    ("nothing", "", "REWARD_MISSING", "neither", {}),
    ("text", "", "REWARD_MISSING", "neither", {}),
    ("sleeps", "", "TIMEOUT", "", {}),
    ("stubborn", "", "TIMEOUT", "", {}),
    ("hangs", "", "TIMEOUT", "", {}),
    ("text", "grade", "", "", {("exact", None): 1.0, ("length", None): 16.0}),
    ("text", "grade_async", "", "", {("reward", None): 0.25}),
    ("text", "grade_badly", "AGENT_ERROR", "", {}),
    ("text", "grade_raises", "AGENT_ERROR", "", {}),
    ("text", "nothing", "AGENT_ERROR", "", {}),
]


async def test_outcomes_are_typed_and_explained(world: World) -> None:
    await world.start(slots=len(OUTCOMES))
    names: list[str] = []
    for agent, grader, kind, *_ in OUTCOMES:
        graded = {"python_grader": f"agent.py:{grader}"} if grader else {}
        version = await world.publish(FILES, python=f"agent.py:{agent}", environment={"FROM_SPEC": "2.0"}, **graded)
        task = {"question": "why", "sleep_s": 3600}
        names += await world.store.create(rollouts_of(version, [task], timeout_s=2 if kind == "TIMEOUT" else 60))
    ended = await world.store.ended(names)
    wrong = {
        (agent, grader): ended[name]
        for name, (agent, grader, kind, says, rewards) in zip(names, OUTCOMES, strict=True)
        if [(each.kind, each.rewards, says in each.message) for each in ended[name]] != [(kind, rewards, True)]
    }
    assert wrong == {}
    assert {each.output for name in names[15:17] for each in ended[name]} == {b"an answer to why"}


async def test_a_running_rollout_is_cancelled(world: World) -> None:
    agent = await world.publish(FILES, python="agent.py:stubborn")
    runner = await world.start()
    [name] = await world.store.create(rollouts_of(agent, [{}]))
    await runner.logged("attempt_started")
    await world.store.cancel([name])
    assert [ended.kind for ended in (await world.store.ended([name]))[name]] == ["CANCELLED"]


async def test_failures_of_infrastructure_are_tried_again_and_never_a_reward(world: World) -> None:
    world.proxy.infra_failures = 1
    agent = await world.publish(FILES, python="agent.py:raises")
    await world.start()
    [ended] = await world.attempts(agent, [{}], max_attempts=2)
    assert [(e.kind, e.rewards) for e in ended] == [("INFRA", {}), ("INFRA", {})]
    assert "RuntimeError: boom helped" in ended[0].message


async def test_a_success_in_spite_of_failed_calls_is_a_success(world: World) -> None:
    world.proxy.infra_failures = 1
    agent = await world.publish(FILES, python="agent.py:number")
    await world.start()
    assert (await world.run(agent, {})).kind == ""


async def test_spans_that_are_not_confirmed_make_it_infra(world: World) -> None:
    world.proxy.confirming = False
    agent = await world.publish(FILES, python="agent.py:number")
    await world.start(flush_s=0.5)
    ended = await world.run(agent, {}, max_attempts=1)
    assert (ended.kind, ended.rewards) == ("INFRA", {})


async def test_two_versions_of_an_agent_keep_their_modules_apart(world: World) -> None:
    code = "import helper\nasync def solve(task):\n    return helper.VALUE\n"
    first = await world.publish({"agent.py": code, "helper.py": "VALUE = 1"}, python="agent.py:solve")
    second = await world.publish({"agent.py": code, "helper.py": "VALUE = 2"}, python="agent.py:solve")
    await world.start()
    rewards = [(await world.run(agent, {})).rewards["reward", None] for agent in (first, second, first)]
    assert rewards == [1.0, 2.0, 1.0]


async def test_input_that_is_not_json_is_the_tasks_fault(world: World) -> None:
    agent = await world.publish(FILES, python="agent.py:number")
    await world.start()
    [rollout] = rollouts_of(agent, [{}])
    rollout.input = b"{"
    [name] = await world.store.create([rollout])
    [ended] = (await world.store.ended([name]))[name]
    assert ended.kind == "AGENT_ERROR"
    assert "not valid application/json" in ended.message


async def test_an_agent_that_does_not_exist_fails_its_rollouts_only(world: World) -> None:
    good = await world.publish(FILES, python="agent.py:number")
    await world.start()
    names = await world.store.create(rollouts_of("resources/agent.none/versions/1", [{}]) + rollouts_of(good, [{}]))
    ended = await world.store.ended(names)
    assert [ended[name][0].kind for name in names] == ["AGENT_ERROR", ""]


async def test_what_an_agent_returns_is_kept_as_json(world: World) -> None:
    code = "from fulmen.emit import emit_reward\nasync def solve(task):\n    emit_reward(1)\n    return {'got': task}\n"
    agent = await world.publish({"agent.py": code}, python="agent.py:solve")
    await world.start()
    ended = await world.run(agent, {"question": "why", "ü": [1, None]})
    assert json.loads(ended.output) == {"got": {"question": "why", "ü": [1, None]}}
