"""Whose key counts, and for how long: signature, expiry, revocation, and the attempt that it was made for."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from fulmen.ids import DEFAULT_PROJECT, AttemptName, uuid7
from fulmen.store.v1 import lease_service_pb2
from fulmen_service_kit.security.revocation import RevocationFollower
from fulmen_service_kit.security.tokens import TokenSigner
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy
from tests.support.llm_proxy.waits import DEADLINE_S, until_refused

OVER = {
    lease_service_pb2.ATTEMPT_STATUS_ENDED: "ended",
    lease_service_pb2.ATTEMPT_STATUS_STALE_EPOCH: "stale_epoch",
    lease_service_pb2.ATTEMPT_STATUS_CANCEL_REQUESTED: "cancel_requested",
    lease_service_pb2.ATTEMPT_STATUS_NOT_FOUND: "not_found",
}


def part(value: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def forgeries(proxy: RunningProxy, store: FakeStore) -> dict[str, str]:
    """Makes keys that were not made by this deployment, or no longer count."""
    name = AttemptName(project=DEFAULT_PROJECT, rollout_id=uuid7(), number=1)
    _, good = proxy.attempt()
    over, expired = proxy.attempt(ttl_s=-10)
    store.stands(over, lease_service_pb2.ATTEMPT_STATUS_ENDED)
    other = TokenSigner("another-deployments-key-of-32-bytes!").attempt_key(
        name, project=DEFAULT_PROJECT, lease_id="l", epoch=1, mode="train", ttl_s=60
    )
    head, claims, signature = good.split(".")
    flipped = signature[:10] + ("A" if signature[10] != "A" else "B") + signature[11:]
    forged = part({"role": "admin", "sub": "eve", "prj": "projects/*", "iss": "fulmen", "exp": int(time.time()) + 60})
    return {
        "missing": "",
        "nonsense": "nonsense",
        "expired": expired,
        "truncated": good[:-1],
        "without its signature": f"{head}.{claims}.",
        "with a bit flipped": f"{head}.{claims}.{flipped}",
        "with other claims": f"{head}.{forged}.{signature}",
        "of another deployment": other,
        "without an algorithm": f"{part({'alg': 'none', 'typ': 'JWT'})}.{forged}.",
        "of depth": base64.urlsafe_b64encode(b"[" * 20_000).decode().rstrip("=") + ".e30.x",
    }


async def test_a_key_that_was_not_made_here_or_has_expired_reaches_nothing(
    proxy: RunningProxy, backend: Backend, store: FakeStore
) -> None:
    for what, key in forgeries(proxy, store).items():
        status, answer = await proxy.chat(key)
        assert (status, answer["error"]["code"]) == (401, "token_invalid"), what
        if len(key) > 5:
            assert key not in str(answer)
    assert backend.received == []


async def test_a_key_that_looks_expired_is_good_for_as_long_as_its_attempt_runs(
    proxy: RunningProxy, store: FakeStore
) -> None:
    attempt, key = proxy.attempt(ttl_s=-3600)
    assert [(await proxy.chat(key))[0] for _ in range(5)] == [200] * 5
    store.stands(attempt, lease_service_pb2.ATTEMPT_STATUS_ENDED)
    status, answer = await until_refused(proxy, key)
    assert (status, answer["error"]["code"]) in ((403, "attempt_over"), (401, "token_invalid"))


async def test_no_call_of_a_running_attempt_fails_while_the_stores_clock_jumps(
    proxy: RunningProxy, store: FakeStore
) -> None:
    _, key = proxy.attempt()
    follower = proxy.parts.roles["revocations"]
    assert isinstance(follower, RevocationFollower)
    for ahead_s in (0.0, 3600.0, 0.0, -3600.0, 0.0):
        store.keys.ahead_s = ahead_s
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(2):
                polling = asyncio.create_task(follower.follow_once())
                while not polling.done():
                    assert (await proxy.chat(key))[0] == 200
                assert (await proxy.chat(key))[0] == 200


async def test_a_doubt_while_the_store_is_away_is_no_refusal_and_not_the_agents_fault(
    proxy: RunningProxy, store: FakeStore
) -> None:
    attempt, key = proxy.attempt(ttl_s=-10)
    await store.stop()
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json={"model": MODEL}, headers=headers) as answer:
        assert answer.status == 503
        assert int(answer.headers["retry-after"]) >= 1
    await store.start()
    async with asyncio.timeout(DEADLINE_S):
        while (await proxy.chat(key))[0] == 503:
            pass
    assert (await proxy.chat(key))[0] == 200
    assert (await proxy.flush(attempt)).infra_failure_count >= 1


@pytest.mark.parametrize("status", OVER)
async def test_an_attempt_that_is_over_is_refused_without_a_look_at_the_backend(
    proxy: RunningProxy, backend: Backend, store: FakeStore, status: int
) -> None:
    attempt, key = proxy.attempt()
    assert (await proxy.chat(key))[0] == 200
    store.stands(attempt, status)
    refused, answer = await until_refused(proxy, key)
    seen, questions = len(backend.received), len(store.checks)
    again = await proxy.chat(key)
    assert (refused, answer["error"]["code"], answer["error"]["source"]) == (403, "attempt_over", "proxy")
    assert again == (403, answer)
    assert (len(backend.received), len(store.checks)) == (seen, questions)


async def test_an_attempt_that_is_over_reads_no_kept_response(proxy: RunningProxy, store: FakeStore) -> None:
    attempt, key = proxy.attempt()
    kept, headers = f"{proxy.url}/responses/resp_1", {"Authorization": f"Bearer {key}"}
    async with proxy.http.get(kept, headers=headers) as answer:
        assert answer.status == 404
    store.stands(attempt, lease_service_pb2.ATTEMPT_STATUS_ENDED)
    await until_refused(proxy, key)
    async with proxy.http.get(kept, headers=headers) as answer:
        assert (answer.status, (await answer.json())["error"]["code"]) == (403, "attempt_over")


async def test_vendors_clients_do_not_try_again_when_the_attempt_is_over(proxy: RunningProxy, store: FakeStore) -> None:
    attempt, key = proxy.attempt()
    store.stands(attempt, lease_service_pb2.ATTEMPT_STATUS_ENDED)
    await until_refused(proxy, key)
    sent: list[httpx2.Request] = []

    async def note(request: httpx2.Request) -> None:
        sent.append(request)

    async with httpx2.AsyncClient(event_hooks={"request": [note]}) as http:
        chat = openai.AsyncOpenAI(base_url=proxy.url, api_key=key, max_retries=3, http_client=http)
        with pytest.raises(openai.PermissionDeniedError) as raised:
            await chat.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
        claude = anthropic.AsyncAnthropic(
            base_url=proxy.url.removesuffix("/v1"), api_key=key, max_retries=3, http_client=http
        )
        with pytest.raises(anthropic.PermissionDeniedError) as raised_too:
            await claude.messages.create(model=MODEL, max_tokens=9, messages=[{"role": "user", "content": "x"}])
    assert raised.value.code == "attempt_over"
    assert isinstance(raised_too.value.body, dict)
    assert raised_too.value.body["error"]["type"] == "permission_error"
    assert len(sent) == 2


async def test_a_whole_call_in_flight_ends_with_its_attempt(
    proxy: RunningProxy, backend: Backend, store: FakeStore
) -> None:
    attempt, key = proxy.attempt()
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        call = asyncio.create_task(proxy.chat(key))
        await backend.arrived.acquire()
        store.stands(attempt, lease_service_pb2.ATTEMPT_STATUS_CANCEL_REQUESTED)
        status, answer = await call
        await backend.aborted.acquire()
        summary = await proxy.flush(attempt)
    assert (status, answer["error"]["code"]) == (403, "attempt_over")
    assert (summary.call_count, summary.infra_failure_count) == (1, 0)


async def test_a_stream_in_flight_ends_with_its_attempt_and_what_came_is_kept_as_partial(
    proxy: RunningProxy, backend: Backend, store: FakeStore
) -> None:
    attempt, key = proxy.attempt()
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        agent = openai.AsyncOpenAI(base_url=proxy.url, api_key=key, max_retries=0)
        stream = await agent.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
        await anext(aiter(stream))
        store.stands(attempt, lease_service_pb2.ATTEMPT_STATUS_ENDED)
        with pytest.raises(openai.APIError) as raised:
            async for _ in stream:
                pass
        await backend.aborted.acquire()
        await proxy.flush(attempt)
        await agent.close()
    [(span, record)] = store.spans(attempt)
    attributes = {one.key: one.value for one in span.attributes}
    assert "The attempt has ended" in str(raised.value)
    assert attributes["error.type"].string_value == "attempt_over"
    assert record is not None
    assert not record.usable
    assert record.completion_token_ids


async def test_only_attempts_that_call_are_asked_about(proxy: RunningProxy, backend: Backend, store: FakeStore) -> None:
    idle, idle_key = proxy.attempt()
    busy, busy_key = proxy.attempt()
    assert (await proxy.chat(idle_key))[0] == 200
    async with asyncio.timeout(DEADLINE_S):
        while not any(idle in questions for questions in store.checks):
            await store.next_question()
        backend.switches.gate = asyncio.Event()
        call = asyncio.create_task(proxy.chat(busy_key))
        await backend.arrived.acquire()
        await backend.arrived.acquire()
        asked = [await store.next_question() for _ in range(3)]
        backend.switches.gate.set()
        assert (await call)[0] == 200
    assert asked[-1] == [busy]
    assert sum(questions.count(idle) for questions in store.checks) == 1


async def test_while_the_store_is_away_what_was_known_stays(
    proxy: RunningProxy, store: FakeStore, backend: Backend
) -> None:
    attempt, key = proxy.attempt()
    store.stands(attempt, lease_service_pb2.ATTEMPT_STATUS_ENDED)
    await until_refused(proxy, key)
    other, other_key = proxy.attempt()
    store.stands(other, lease_service_pb2.ATTEMPT_STATUS_ENDED)
    await store.stop()
    assert (await proxy.chat(key))[0] == 403
    assert [(await proxy.chat(other_key))[0] for _ in range(3)] == [200, 200, 200]
    await store.start()
    assert (await until_refused(proxy, other_key))[0] == 403


async def test_many_attempts_are_asked_about_in_batches(store: FakeStore, backend: Backend) -> None:
    async with running_proxy(store.target, backend_url=backend.url) as proxy:
        guard_batch = 1000
        keys = [proxy.attempt()[1] for _ in range(20)]
        assert [status for status, _ in await asyncio.gather(*(proxy.chat(key) for key in keys))] == [200] * 20
        async with asyncio.timeout(DEADLINE_S):
            while sum(len(questions) for questions in store.checks) < len(keys):
                await store.next_question()
    assert len(store.checks) < len(keys)
    assert max(len(questions) for questions in store.checks) <= guard_batch
