"""Declared side effects happen once per rollout: through the SDK, the proxy and the store, as an agent declares them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest

import fulmen
from fulmen import EffectFailed, EffectUnknown, effect
from fulmen.agent import Context, entered
from fulmen.errors import ArgumentInvalid, AttemptOver, PermissionDenied
from fulmen.ids import parse_attempt_name, parse_runner_name
from fulmen.store.v1 import effect_service_pb2 as pb
from fulmen.store.v1 import lease_pb2, rollout_pb2, rollout_selection_pb2
from fulmen_service_kit.security.tokens import Role
from fulmen_store.transport.effect_service import MAX_EFFECTS
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, Stubs, create

TOKEN = "0123456789abcdef"


@pytest.fixture
def store_settings() -> dict[str, Any]:
    """Returns leases that last: sessions expire when a test says so."""
    return {"lease_ttl_s": 3600.0}


@pytest.fixture
async def proxy(store: StoreHandle) -> AsyncIterator[RunningProxy]:
    """Yields a proxy of the store."""
    async with running_proxy(store.target, signing_key=SIGNING_KEY) as running:
        yield running


class Ledger:
    """What was done."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def book(self, line: str) -> Callable[[], dict[str, Any]]:
        """Returns what books a line."""

        def call() -> dict[str, Any]:
            self.lines.append(line)
            return {"booked": line, "number": len(self.lines)}

        return call


@pytest.fixture
def ledger() -> Ledger:
    """Returns an empty ledger."""
    return Ledger()


async def begun(stubs: Stubs) -> tuple[Runner, lease_pb2.Assignment]:
    """Creates a rollout, unless one waits, and takes its attempt."""
    policy = rollout_pb2.RolloutPolicy(max_attempts=9)
    policy.retry_backoff.FromSeconds(0)
    await create(stubs, policy=policy)
    return await taken(stubs)


async def taken(stubs: Stubs) -> tuple[Runner, lease_pb2.Assignment]:
    """Takes the next attempt."""
    runner = await Runner(stubs).open()
    (assignment,) = await runner.take(1)
    return runner, assignment


async def lose(store: StoreHandle, database_url: str, runner: Runner) -> None:
    """Lets the session of a runner expire, as it does when the runner is gone."""
    connection = await asyncpg.connect(database_url)
    update = "update runner_session set lease_until = now() - interval '1 second' where id = $1"
    await connection.execute(update, parse_runner_name(runner.opened.runner))
    await connection.close()
    await store.parts.roles["lease-sweeper"].sweep_once()


async def in_attempt(proxy: RunningProxy, assignment: lease_pb2.Assignment, act: Callable[[], Any]) -> Any:
    """Runs an agent's code in a thread, as a runner does."""
    context = Context(
        rollout=assignment.rollout.name,
        attempt=assignment.attempt,
        attempt_number=assignment.epoch,
        mode="train",
        deadline=time.monotonic() + 60,
        environment={"OPENAI_BASE_URL": proxy.url, "OPENAI_API_KEY": assignment.attempt_key},
    )

    def run() -> Any:
        with entered(context):
            return act()

    return await asyncio.to_thread(run)


async def test_an_attempt_that_goes_on_gets_the_result_of_what_was_done(
    store: StoreHandle, stubs: Stubs, database_url: str, proxy: RunningProxy, ledger: Ledger
) -> None:
    runner, assignment = await begun(stubs)
    first = await in_attempt(proxy, assignment, lambda: effect("book", "invoice 7 ä", ledger.book("seven")))
    await lose(store, database_url, runner)
    _, assignment = await taken(stubs)
    again = await in_attempt(proxy, assignment, lambda: effect("book", "invoice 7 ä", ledger.book("seven")))
    other = await in_attempt(proxy, assignment, lambda: effect("book", "invoice 8", ledger.book("eight")))
    assert assignment.epoch == 2
    assert first == again == {"booked": "seven", "number": 1}
    assert other == {"booked": "eight", "number": 2}


async def test_what_a_lost_attempt_was_at_is_unknown_and_not_repeated(
    store: StoreHandle, stubs: Stubs, database_url: str, proxy: RunningProxy, ledger: Ledger
) -> None:
    runner, assignment = await begun(stubs)

    def dies() -> None:
        ledger.lines.append("half")
        raise ConnectionError("The bank hung up.")

    with pytest.raises(ConnectionError):
        await in_attempt(proxy, assignment, lambda: effect("pay", "1", dies))
    await lose(store, database_url, runner)
    _, assignment = await taken(stubs)
    with pytest.raises(EffectUnknown, match="attempts/1"):
        await in_attempt(proxy, assignment, lambda: effect("pay", "1", ledger.book("again")))
    assert ledger.lines == ["half"]


async def test_of_two_attempts_at_the_same_time_one_does_it(stubs: Stubs, proxy: RunningProxy, ledger: Ledger) -> None:
    _, assignment = await begun(stubs)
    acts = [in_attempt(proxy, assignment, lambda: effect("mail", "", ledger.book("one"))) for _ in range(8)]
    found = await asyncio.gather(*acts, return_exceptions=True)
    assert ledger.lines == ["one"]
    assert {type(each) for each in found} <= {dict, EffectUnknown}


async def test_a_coroutine_function_is_awaited(stubs: Stubs, proxy: RunningProxy) -> None:
    _, assignment = await begun(stubs)

    async def send() -> tuple[int, str]:
        await asyncio.sleep(0)
        return (1, "sent")

    def act() -> Any:
        async def agent() -> list[Any]:
            return [await effect("send", "a", send), await effect("send", "a", send)]

        return asyncio.run(agent())

    assert await in_attempt(proxy, assignment, act) == [[1, "sent"], [1, "sent"]]


async def test_an_attempt_that_is_over_begins_nothing(
    store: StoreHandle, stubs: Stubs, database_url: str, proxy: RunningProxy, ledger: Ledger
) -> None:
    runner, assignment = await begun(stubs)
    await lose(store, database_url, runner)
    with pytest.raises(EffectFailed, match="403"):
        await in_attempt(proxy, assignment, lambda: effect("book", "1", ledger.book("late")))
    assert not ledger.lines


async def test_outside_an_attempt_an_effect_is_a_call(ledger: Ledger) -> None:
    assert fulmen.effect("book", "1", ledger.book("alone"))["booked"] == "alone"
    assert ledger.lines == ["alone"]


async def test_malformed_effects_are_refused(stubs: Stubs, proxy: RunningProxy) -> None:
    _, assignment = await begun(stubs)
    request = {"attempt": assignment.attempt, "name": "book", "key": "1", "token": TOKEN}
    for wrong in ({"name": "a b"}, {"key": "k" * 257}, {"token": "short"}, {"attempt": "nobody"}):
        with pytest.raises(ArgumentInvalid):
            await stubs.effects.BeginEffect(pb.BeginEffectRequest(**(request | wrong)))
    with pytest.raises(ArgumentInvalid):
        await stubs.effects.EndEffect(pb.EndEffectRequest(**request, result_json=b"1"))
    await stubs.effects.BeginEffect(pb.BeginEffectRequest(**request))
    for result in (b"", b"{", b'"' + b"x" * 65536 + b'"'):
        with pytest.raises(ArgumentInvalid):
            await stubs.effects.EndEffect(pb.EndEffectRequest(**request, result_json=result))
    ended = await stubs.effects.EndEffect(pb.EndEffectRequest(**request, result_json=b"[1]"))
    later = await stubs.effects.EndEffect(pb.EndEffectRequest(**request, result_json=b"[2]"))
    assert ended.effect.result_json == later.effect.result_json == b"[1]"
    headers = {"x-api-key": proxy.signer.issue(Role.CLIENT, subject="an app", ttl_s=60)}
    async with proxy.http.post(
        f"{proxy.url}/effects", json={"name": "book", "token": TOKEN}, headers=headers
    ) as answer:
        assert answer.status == 403


async def test_effects_that_begin_at_the_same_moment_do_not_pass_the_limit_of_a_rollout(
    stubs: Stubs, database_url: str
) -> None:
    _, assignment = await begun(stubs)
    rollout_id = parse_attempt_name(assignment.attempt).rollout_id
    add = "insert into effect (rollout_id, name, key, attempt, token) select $1, 'book', n::text, 1, $2 from "
    connection, holder = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    await connection.execute(f"{add} generate_series(1, $3) n", rollout_id, TOKEN, MAX_EFFECTS - 1)
    # Both are held where each has seen room for one more, for as long as this transaction has rows of their names.
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute(f"{add} unnest($3::text[]) n", rollout_id, TOKEN, ["one", "other"])
    base = {"attempt": assignment.attempt, "name": "book", "token": TOKEN}
    requests = [pb.BeginEffectRequest(**base, key=key) for key in ("one", "other")]
    calls = [asyncio.ensure_future(stubs.effects.BeginEffect(request)) for request in requests]
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    async with asyncio.timeout(60):
        while await connection.fetchval(waiting) < len(calls):  # noqa: ASYNC110  # of a server
            await asyncio.sleep(0.01)
    await transaction.rollback()
    found = await asyncio.gather(*calls, return_exceptions=True)
    count = await connection.fetchval("select count(*) from effect where rollout_id = $1", rollout_id)
    await connection.close()
    await holder.close()
    assert count == MAX_EFFECTS
    (refused,) = (each for each in found if isinstance(each, ArgumentInvalid))
    assert f"the rollout has {MAX_EFFECTS} effects" in str(refused)
    # What was begun is found, whatever the number.
    again = await stubs.effects.BeginEffect(requests[found.index(refused) - 1])
    assert again.effect.state == pb.EFFECT_STATE_BEGUN


async def test_effects_are_the_proxys_alone_and_go_with_the_rollout(
    store: StoreHandle, stubs: Stubs, database_url: str
) -> None:
    runner, assignment = await begun(stubs)
    request = pb.BeginEffectRequest(attempt=assignment.attempt, name="book", key="1", token=TOKEN)
    agent = await store.stubs(token=assignment.attempt_key)
    with pytest.raises(PermissionDenied):
        await agent.effects.BeginEffect(request)
    await stubs.effects.BeginEffect(request)
    await runner.complete([assignment])
    with pytest.raises(AttemptOver):
        await stubs.effects.BeginEffect(
            pb.BeginEffectRequest(attempt=assignment.attempt, name="book", key="2", token=TOKEN)
        )
    await stubs.rollouts.DeleteRollouts(rollout_selection_pb2.DeleteRolloutsRequest(names=[assignment.rollout.name]))
    connection = await asyncpg.connect(database_url)
    assert await connection.fetchval("select count(*) from effect") == 0
    await connection.close()
