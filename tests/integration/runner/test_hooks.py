"""Hooks in a real runner: loaded by name, called around attempts, reported when they fail; monitor and alerts."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import ClientSession, web

from fulmen.ids import trace_id_of
from tests.support.runner.fixtures import World
from tests.support.runner.harness import RunnerProcess, rollouts_of

SECRET = "a secret that signs alerts"
DEADLINE_S = 30.0

AGENT = """
import fulmen

async def solve(task):
    if task.get("fail"):
        raise ValueError("no")
    fulmen.emit_annotation({"a": 1})
    try:
        raise KeyError("caught")
    except KeyError as error:
        fulmen.emit_exception(error)
    return task.get("reward", 1.0)
"""
HOOKS = """
import asyncio, json, os
from fulmen.hooks import FailAttempt, Hook

class Journal(Hook):
    def note(self, **line):
        with open(os.environ["JOURNAL"], "a") as file:
            file.write(json.dumps(line) + "\\n")

    async def on_rollout_start(self, attempt):
        self.note(point="on_rollout_start", attempt=attempt.attempt, mode=attempt.mode, input=attempt.input.decode())

    async def on_trace_start(self, attempt):
        self.note(point="on_trace_start")

    async def on_trace_end(self, attempt, spans):
        self.note(point="on_trace_end", spans=dict(spans.span_counts), errors=spans.error_count)

    async def on_rollout_end(self, attempt, end):
        self.note(point="on_rollout_end", kind=end.failure_kind, reward=end.reward)

    async def close(self):
        self.note(point="close")

class Broken:
    async def on_trace_end(self, attempt, spans):
        raise RuntimeError("broken")

class Slow:
    async def on_rollout_start(self, attempt):
        if b"fail" in attempt.input:
            await asyncio.Event().wait()

class Strict:
    async def on_rollout_end(self, attempt, end):
        if end.reward == 0.25:
            raise FailAttempt("a quarter is too little")

strict = Strict()
"""


class Receiver:
    """A webhook that refuses what the test wants, then accepts."""

    def __init__(self, refusals: list[int]) -> None:
        self._refusals = refusals
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.news = asyncio.Event()

    async def receive(self, request: web.Request) -> web.Response:
        self.requests.append((dict(request.headers), await request.read()))
        self.news.set()
        return web.Response(status=self._refusals.pop(0) if self._refusals else 204)

    async def got(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.requests) < count:
                self.news.clear()
                await self.news.wait()


@pytest_asyncio.fixture
async def receiver() -> AsyncIterator[tuple[Receiver, str]]:
    """Yields a webhook that answers 503 once, and its URL."""
    received = Receiver([503])
    application = web.Application()
    application.router.add_post("/alerts", received.receive)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield received, f"http://127.0.0.1:{runner.addresses[0][1]}/alerts"
    await runner.cleanup()


@pytest.fixture
def hook_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts the hooks where a runner finds them; returns their journal."""
    (tmp_path / "hooks_of_tests.py").write_text(HOOKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    journal = tmp_path / "journal"
    monkeypatch.setenv("JOURNAL", str(journal))
    return journal


async def metrics_of(runner: RunnerProcess) -> dict[str, float]:
    ports = await runner.ports()
    async with ClientSession() as session, session.get(f"http://127.0.0.1:{ports['metrics_port']}/metrics") as answer:
        text = await answer.text()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


async def test_hooks_see_attempts_fail_them_and_are_reported(world: World, hook_environment: Path) -> None:
    agent = await world.publish({"agent.py": AGENT}, python="agent.py:solve")
    names = [f"hooks_of_tests:{name}" for name in ("Journal", "Broken", "Slow", "strict")]
    monitor = "fulmen_runner.hooks.monitor:Monitor"
    runner = await world.start(hooks=",".join([*names, monitor]), hook_timeout_s=5, slots=1)
    [good, poor, bad] = await world.store.create(
        rollouts_of(agent, [{}, {"reward": 0.25}, {"fail": True}], max_attempts=1)
    )
    ended = {name: attempts[0] for name, attempts in (await world.store.ended([good, poor, bad])).items()}
    assert (ended[good].kind, ended[good].rewards) == ("", {("reward", None): 1.0})
    assert (ended[poor].kind, ended[poor].message) == ("AGENT_ERROR", "a quarter is too little")
    assert ended[bad].kind == "AGENT_ERROR"

    metrics = await metrics_of(runner)
    labels = 'agent="agent.tests",mode="train"'
    assert metrics['fulmen_agent_attempts_total{agent="agent.tests",failure_kind="none",mode="train"}'] == 2
    assert metrics['fulmen_agent_attempts_total{agent="agent.tests",failure_kind="AGENT_ERROR",mode="train"}'] == 1
    assert metrics[f"fulmen_agent_duration_seconds_count{{{labels}}}"] == 3
    assert metrics[f"fulmen_agent_span_errors_total{{{labels}}}"] == 2
    assert metrics['fulmen_agent_reward_sum{agent="agent.tests",dimension="reward",mode="train"}'] == 1.25
    assert metrics['fulmen_agent_rolling_error_rate{agent="agent.tests"}'] == pytest.approx(1 / 3)
    failures = {key: value for key, value in metrics.items() if key.startswith("fulmen_runner_hook_failures_total")}
    assert sorted(failures.values()) == [1, 3]

    reported = [span for span in world.double.otlp_spans if span.name == "fulmen.hook"]
    assert len(reported) == 4
    assert {event.name for span in reported for event in span.events} == {"fulmen.hook.failed"}
    assert {span.trace_id.hex() for span in reported} == {trace_id_of(name) for name in ended}
    assert (await runner.logged("hook_failed"))["error"] in ("timed out", "RuntimeError: broken")

    runner.send(signal.SIGTERM)
    assert await runner.exit_code() == 0
    lines = [json.loads(line) for line in hook_environment.read_text().splitlines()]
    assert [line["point"] for line in lines] == [
        *["on_rollout_start", "on_trace_start", "on_trace_end", "on_rollout_end"] * 3, "close",
    ]  # fmt: skip
    assert lines[0]["input"] == "{}"
    assert lines[2]["spans"] == {"fulmen.annotation": 1, "fulmen.exception": 1}
    # The one that fails it is called before, at ends.
    assert [line.get("kind") for line in lines if line["point"] == "on_rollout_end"] == [
        "",
        "AGENT_ERROR",
        "AGENT_ERROR",
    ]


async def test_alerts_are_signed_retried_and_quiet_for_a_while(
    world: World, receiver: tuple[Receiver, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    received, url = receiver
    alerts = {"URL": url, "SECRET": SECRET, "MIN_ATTEMPTS": "3", "MAX_ERROR_RATE": "0.4"}
    for name, value in alerts.items():
        monkeypatch.setenv(f"FULMEN_ALERTS_{name}", value)
    agent = await world.publish({"agent.py": AGENT}, python="agent.py:solve")
    runner = await world.start(hooks="fulmen_runner.hooks.alerts:Alerts", slots=1)
    tasks = [{}, {"fail": True}, {"fail": True}, {"fail": True}]
    await world.store.ended(await world.store.create(rollouts_of(agent, tasks, max_attempts=1)))
    await received.got(2)
    (headers, body), (_, again) = received.requests
    assert body == again
    signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    expected = base64.b64encode(hmac.digest(SECRET.encode(), signed, hashlib.sha256)).decode()
    assert headers["webhook-signature"] == f"v1,{expected}"
    document = json.loads(body)
    assert (document["rule"], document["agent"], document["limit"]) == ("error_rate", "agent.tests", 0.4)
    assert document["attempt_count"] == 3
    assert document["value"] == pytest.approx(2 / 3)
    await runner.close()
    assert len(received.requests) == 2


async def test_a_runner_names_every_hook_that_it_cannot_load(world: World, hook_environment: Path) -> None:
    hooks = "nowhere:x,hooks_of_tests:Absent,hooks_of_tests:json,fulmen_runner.hooks.alerts:Alerts"
    with pytest.raises(AssertionError) as caught:
        await world.start(hooks=hooks)
    said = str(caught.value)
    assert all(target in said for target in hooks.split(","))
    assert "Traceback" not in said
