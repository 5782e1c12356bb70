"""Runners are killed under attempts of 20 turns: their rollouts go on where they were, and nothing is sampled twice."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest

from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.store.v1 import rollout_pb2, span_pb2, span_service_pb2, span_service_pb2_grpc
from fulmen.trajectories.calls import drop_reasons
from fulmen.trajectories.reading import read_calls
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import JSON, Backend, prompt_ids_of, token_ids_of
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.runner.fleet import Fleet, Watched
from tests.support.runner.harness import SIGNING_KEY, bundle_of, rollouts_of, spec_of, token
from tests.support.runner.stores import RealStore

pytestmark = pytest.mark.timeout(900)

TURNS = 20
RUNNERS = 3
LEASE_TTL_S = 3.0
AGENT = f"""
import os
from pathlib import Path

import fulmen
import httpx2

async def book(task, turn):
    ledger, line = Path(task["ledger"]), f"{{task['question']}}, turn {{turn}}\\n"

    async def write():
        with ledger.open("a") as file:
            file.write(line)
        return {{"booked": turn}}

    try:
        return await fulmen.effect("book", str(turn), write)
    except fulmen.EffectUnknown:  # the runner was killed meanwhile: the ledger says whether it was booked
        return {{"booked": turn}} if line in ledger.read_text() else await write()

async def solve(task, context):
    messages = [{{"role": "user", "content": task["question"]}}]
    headers = {{"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    async with httpx2.AsyncClient(timeout=120, trust_env=False, headers=headers) as client:
        for turn in range({TURNS}):
            body = {{"model": "tiny", "messages": messages, "temperature": 1}}
            answer = await client.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            said = answer.json()["choices"][0]["message"]["content"]
            booked = (await book(task, turn))["booked"]
            messages += [
                {{"role": "assistant", "content": said}}, {{"role": "user", "content": f"turn {{booked}} of " + said[:8]}}
            ]
    return len(messages)
"""


def sample(body: JSON) -> str:
    """Returns what a policy with a seed for each request says: far more than one could guess, and always the same."""
    return hashlib.sha256(json.dumps(body["messages"]).encode()).hexdigest()


def undisturbed(question: str) -> list[tuple[list[int], list[int]]]:
    """Returns prompts and completions, token ids, of an attempt whose runner was not killed."""
    messages: list[JSON] = [{"role": "user", "content": question}]
    calls = []
    for turn in range(TURNS):
        said = sample({"messages": messages})
        calls.append((prompt_ids_of(messages), token_ids_of(said)))
        messages = [
            *messages,
            {"role": "assistant", "content": said},
            {"role": "user", "content": f"turn {turn} of {said[:8]}"},
        ]
    return calls


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[RealStore]:
    """Yields a store with short leases."""
    async with RealStore(database_url, lease_ttl_s=LEASE_TTL_S) as real:
        yield real


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    """Yields a model server."""
    async with Backend(script=sample) as running:
        yield running


@pytest.fixture
async def proxy(store: RealStore, backend: Backend) -> AsyncIterator[RunningProxy]:
    """Yields a proxy with a route of a policy."""
    async with running_proxy(store.target, signing_key=SIGNING_KEY, backend_url=backend.url) as running:
        yield running


async def kill_some(
    fleet: Fleet, backend: Backend, database_url: str, rng: random.Random, *, kills: int, calls: int
) -> None:
    """Kills runners, each time after a random number of further calls."""
    connection = await asyncpg.connect(database_url)
    try:
        for number in range(kills):
            reached = rng.uniform(number + 0.3, number + 0.9) / kills * calls * 0.9
            while len(backend.received) < reached:  # noqa: ASYNC110  # a count of another task
                await asyncio.sleep(0.01)
            # Losses are at random: the third of a rollout says nothing about what its agent does to runners.
            await connection.execute("update item set runner_losses = 0")
            await fleet.kill(rng.randrange(RUNNERS), rng)
    finally:
        await connection.close()


async def chunks_of(channel: FulmenChannel, attempts: list[str]) -> dict[str, list[span_pb2.SpanChunk]]:
    """Returns the stored chunks of attempts."""
    stub = span_service_pb2_grpc.SpanServiceStub(channel)
    found: dict[str, list[span_pb2.SpanChunk]] = {name: [] for name in attempts}
    async for message in stub.StreamSpans(span_service_pb2.StreamSpansRequest(parents=attempts)):
        for chunk in message.chunks:
            found[chunk.attempt].append(chunk)
    return found


@pytest.mark.long(short=True)
@pytest.mark.parametrize(
    ("attempts", "kills", "slots"), [(10, 2, 4), pytest.param(200, 12, 10, marks=pytest.mark.long)]
)
async def test_attempts_of_killed_runners_go_on_where_they_were(
    store: RealStore,
    backend: Backend,
    proxy: RunningProxy,
    database_url: str,
    tmp_path: Path,
    attempts: int,
    kills: int,
    slots: int,
) -> None:
    addresses = {
        "llm_proxy_url": f"http://127.0.0.1:{proxy.parts.ports['http_port']}",
        "llm_proxy_targets": f"127.0.0.1:{proxy.parts.server.port}",
    }
    fleet = Fleet(store, tmp_path, count=RUNNERS, settings={**addresses, "slots": slots, "instrument": "none"})
    questions = [f"question {number}" for number in range(attempts)]
    watched = Watched()
    async with open_channel(store.target, token=token(Role.CLIENT)) as channel:
        try:
            await fleet.start()
            following = asyncio.create_task(watched.follow(channel))
            bundle = await store.publish("bundle.long", bundle_of({"agent.py": AGENT}))
            agent = await store.publish("agent.long", spec_of(bundle=bundle, python="agent.py:solve"))
            ledger = tmp_path / "ledger"
            tasks: list[object] = [{"question": question, "ledger": str(ledger)} for question in questions]
            names = await store.create(rollouts_of(agent, tasks, timeout_s=600, max_attempts=20))
            rng = random.Random(20261129)
            await kill_some(fleet, backend, database_url, rng, kills=kills, calls=attempts * TURNS)
            await watched.until(attempts)
            following.cancel()
            await fleet.stop()
        finally:
            await fleet.close()
        final = {rollout.name: rollout.attempts[-1].name for rollout in watched.rollouts}
        stored = await chunks_of(channel, list(final.values()))
    lost = sum(len(rollout.attempts) - 1 for rollout in watched.rollouts)
    assert lost
    assert {rollout.state for rollout in watched.rollouts} == {rollout_pb2.ROLLOUT_STATE_SUCCEEDED}
    for name, question in zip(names, questions, strict=True):
        calls = read_calls(stored[final[name]])
        assert [(list(memoryview(c.prompt).cast("i")), list(memoryview(c.completion).cast("i"))) for c in calls] == (
            undisturbed(question)
        )
        assert drop_reasons(calls) == [None] * TURNS
    booked = ledger.read_text().splitlines()
    assert sorted(booked) == sorted(f"{question}, turn {turn}" for question in questions for turn in range(TURNS))
    sampled = Counter(json.dumps(each.body["messages"]) for each in backend.received)
    again = sum(sampled.values()) - len(sampled)
    replayed = proxy.metric("replayed_calls_total") or 0
    print(f"{lost} attempts lost, {int(replayed)} calls given again, {again} of {len(sampled)} sampled again")
    assert len(sampled) == attempts * TURNS
    assert replayed
    assert again <= 0.05 * len(sampled)
