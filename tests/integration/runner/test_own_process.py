"""Python agents in processes of their own."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from fulmen.ids import trace_id_of
from fulmen.runner.v1.agent_spec_pb2 import Isolation
from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of, wait_for_exit
from tests.support.runner.stores import Ended

TIMEOUT_S = 12
"""Long enough for a child to start on a busy machine."""

PROCESS = Isolation.ISOLATION_PROCESS

AGENT = """
import asyncio, ctypes, json, os, signal, sys, threading, time
import httpx2
from opentelemetry import trace
from fulmen import emit_reward
from fulmen.agent import current
import helper

tracer = trace.get_tracer("an-agent")
AT_IMPORT = os.environ.get("FULMEN_ROLLOUT", ""), os.environ["OPENAI_API_KEY"], os.environ["OWN"]

async def steps(task, context):
    emit_reward(0.5, dimension="format")
    with tracer.start_as_current_span("first"):
        yield 1
    yield {"step": context.step}
def blocking_steps(task):
    yield 0.25
    return 3
async def number(task): return 0.5
def pid(task, context):
    me = {"pid": os.getpid(), "rollout": os.environ["FULMEN_ROLLOUT"], "key": os.environ["OPENAI_API_KEY"][:8]}
    assert os.environ["FULMEN_ROLLOUT"] == context.rollout == current().rollout
    assert AT_IMPORT == ("", "fulmen-attempt-key", "1"), AT_IMPORT
    emit_reward(1)
    return me
async def calls(task, context):
    def ask():
        return httpx2.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json={"model": "m"}).json()
    said = [(await asyncio.to_thread(ask))["choices"][0]["message"]["content"]]
    said.append(ask()["choices"][0]["message"]["content"])
    return float(said == [context.attempt] * 2)
client = httpx2.AsyncClient()
async def keeps_a_client(task, context):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    said = (await client.post(url, json={"model": "m"})).json()["choices"][0]["message"]["content"]
    await asyncio.to_thread(time.sleep, 0)
    emit_reward(float(said == context.attempt))
    return {"pid": os.getpid()}
async def leaves_a_task(task):
    asyncio.create_task(asyncio.sleep(3600))
    emit_reward(1)
    return {"pid": os.getpid()}
def raises(task): raise RuntimeError("boom " + helper.WORD)
def segfault(task): print("last words", file=sys.stderr, flush=True); ctypes.string_at(0)
def leaves(task): os._exit(7)
def forks_and_leaves(task):
    if os.fork() == 0: time.sleep(3600)
    os._exit(8)
def unsendable(task): return {1, 2}
def deep(task):
    nest = []
    for _ in range(100_000): nest = [nest]
    return nest
def recurses(task): return recurses(task)
def forges(task):
    import socket
    for fd in range(3, 64):
        try: socket.socket(fileno=fd).sendall(b"\\xff" * 4096)
        except OSError: pass
    time.sleep(3600)
def hangs(task):
    open(task["file"], "w").write(str(os.getpid()))
    while True:
        try: time.sleep(3600)
        except BaseException: pass
async def waits(task):
    try: await asyncio.Event().wait()
    finally: open(task["file"], "w").write("closed")
def dawdles(task):
    try: time.sleep(3600)
    finally: open(task["file"], "w").write("closed")
def leaves_a_thread(task):
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
    emit_reward(1)
    return {"pid": os.getpid()}
def leaves_a_child(task):
    import subprocess
    subprocess.Popen(["sleep", "3600"])
    emit_reward(1)
    return {"pid": os.getpid()}
def grade(task, outcome, context):
    left = len((context.work_dir / "left").read_text())
    return {"said": outcome["said"], "had": context.rewards["style", None, b""], "left": left}
def answers(task, context):
    (context.work_dir / "left").write_text("four")
    emit_reward(0.5, dimension="style")
    return {"said": task["said"]}
"""
# The name of a module of Python's own, which what the runner imports in a child must not find.
FILES = {"agent.py": AGENT, "helper.py": "WORD = 'helped'\n", "numbers.py": ""}


async def run(world: World, target: str, tasks: list[object], *, timeout_s: float = 60, **spec: object) -> list[Ended]:
    """Runs one agent on each task; returns the attempts."""
    spec = {"python": f"agent.py:{target}", "environment": {"OWN": "1"}, "isolation": PROCESS, **spec}
    agent = await world.publish(FILES, **spec)
    return [ended for [ended] in await world.attempts(agent, tasks, timeout_s=timeout_s, max_attempts=1)]


async def test_everything_works_as_inside_the_runner(world: World) -> None:
    await world.start(slots=1)
    [walked] = await run(world, "steps", [{}])
    assert (walked.message, walked.rewards) == ("", {("format", None): 0.5, ("reward", 0): 1.0})
    assert json.loads(walked.output) == {"step": 1}
    [span] = [span for span in world.double.otlp_spans if span.name == "first"]
    attributes = {attribute.key: attribute.value for attribute in span.attributes}
    assert f"{attributes['fulmen.rollout'].string_value}/attempts/1" == walked.attempt
    assert attributes["fulmen.step"].int_value == 0
    assert span.trace_id.hex() == trace_id_of(walked.attempt)
    [blocking] = await run(world, "blocking_steps", [{}])
    assert (blocking.message, blocking.rewards) == ("", {("reward", 0): 0.25, ("reward", None): 3.0})
    for ended in await run(world, "calls", [{}] * 3):
        assert (ended.message, ended.rewards) == ("", {("reward", None): 1.0})
    [graded] = await run(world, "answers", [{"said": 2}], python_grader="agent.py:grade")
    assert (graded.message, graded.rewards) == (
        "",
        {("style", None): 0.5, ("said", None): 2.0, ("had", None): 0.5, ("left", None): 4.0},
    )


async def test_a_client_of_the_module_serves_all_attempts_of_a_child(world: World) -> None:
    await world.start(slots=1, child_attempts=3)
    ended = await run(world, "keeps_a_client", [{}] * 3)
    assert [(one.message, one.rewards) for one in ended] == [("", {("reward", None): 1.0})] * 3
    assert len({one.output for one in ended}) == 1


async def test_a_child_is_used_again_only_if_its_attempt_left_nothing_behind(world: World) -> None:
    await world.start(slots=1, child_attempts=3)

    def pids(ended: list[Ended]) -> list[int]:
        assert [one.message for one in ended] == [""] * len(ended)
        return [json.loads(one.output)["pid"] for one in ended]

    first, second, third, fourth = pids(await run(world, "pid", [{}] * 4))
    assert first == second == third != fourth
    for target in ("leaves_a_thread", "leaves_a_child", "leaves_a_task"):
        first, second = pids(await run(world, target, [{}] * 2))
        assert first != second
        await wait_for_exit(first)


@pytest.mark.parametrize("batch", [0, 1])
async def test_every_way_to_die_is_reported(world: World, batch: int) -> None:
    await world.start(slots=2)
    says = {
        "raises": "RuntimeError: boom helped",
        "segfault": "signal 11 (SIGSEGV)\nFatal|signal 11 (SIGSEGV)\nlast words",
        "leaves": "exited with status 7",
        "forks_and_leaves": "exited with status 8",
        "unsendable": "REWARD_MISSING",
        "deep": "REWARD_MISSING",
        "recurses": "RecursionError",
        "forges": "agent process",
        "missing": "has no callable 'missing'",
    }
    for target in list(says)[batch::2]:
        [ended] = await run(world, target, [{}])
        if says[target] == "REWARD_MISSING":
            assert ended.kind == "REWARD_MISSING"
        else:
            assert ended.kind == "AGENT_ERROR", target
            assert any(text in ended.message for text in says[target].split("|")), (target, ended.message)
    [graded] = await run(world, "unsendable", [{}], python_grader="agent.py:grade")
    assert "builtins.set is not representable in JSON" in graded.message
    [alive] = await run(world, "number", [{}])
    assert alive.rewards == {("reward", None): 0.5}


@pytest.mark.long(short=True)
async def test_what_blocks_is_killed_and_frees_its_slot(world: World, tmp_path: Path) -> None:
    await world.start(slots=3)
    targets = ("hangs", "waits", "dawdles")
    files = [tmp_path / target for target in targets]
    runs = (
        run(world, target, [{"file": str(file)}], timeout_s=TIMEOUT_S)
        for target, file in zip(targets, files, strict=True)
    )
    for [ended] in await asyncio.gather(*runs):
        assert ended.kind == "TIMEOUT"
        assert "keeps its slot" not in ended.message
    await wait_for_exit(int(files[0].read_text()))
    assert [file.read_text() for file in files[1:]] == ["closed", "closed"]
    [alive] = await run(world, "number", [{}])
    assert alive.rewards == {("reward", None): 0.5}


async def test_no_child_outlives_a_killed_runner(world: World) -> None:
    runner = await world.start(slots=1)
    world.proxy.holding = True
    [idle] = await run(world, "pid", [{}])
    agent = await world.publish(FILES, python="agent.py:calls", environment={"OWN": "1"}, isolation=PROCESS)
    await world.store.create(rollouts_of(agent, [{}]))
    await world.proxy.until_waiting(1)
    runner.send(signal.SIGKILL)
    await runner.exit_code()
    await wait_for_exit(json.loads(idle.output)["pid"])
    world.proxy.release()
