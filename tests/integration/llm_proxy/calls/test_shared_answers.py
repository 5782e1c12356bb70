"""Proxies share answers through Redis: byte for byte, sealed, and never at the cost of a call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2
from fulmen_llm_proxy.calls import shared_answers
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.security.tokens import Role
from tests.support.certificates import Authority
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, running_proxy, target
from tests.support.llm_proxy.waits import eventually
from tests.support.redis_server import PASSWORD, RedisServer

Answer = tuple[str | None, bytes]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets lookups take longer than in operation: a busy machine makes no test fail."""
    monkeypatch.setattr(shared_answers, "_DEADLINE_S", 10.0)


@pytest.fixture
async def redis() -> AsyncIterator[RedisServer]:
    """Yields a Redis."""
    async with RedisServer() as running:
        yield running


@pytest.fixture
async def pair(
    store: FakeStore, backend: Backend, redis: RedisServer
) -> AsyncIterator[tuple[RunningProxy, RunningProxy]]:
    """Yields two proxies with a cached route `judge`."""
    async with (
        running_proxy(store.target, backend_url=backend.url, cache_url=redis.url) as one,
        running_proxy(store.target, cache_url=redis.url) as two,
    ):
        await serve(one)
        yield one, two


async def serve(proxy: RunningProxy) -> None:
    route = route_pb2.Route(name="routes/judge", targets=[target("one", policy="", version=0)], cached=True)
    await proxy.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))


def key_of(proxy: RunningProxy, project: str = "projects/default") -> str:
    return proxy.signer.issue(Role.CLIENT, subject="app", ttl_s=600, project=project)


async def ask(proxy: RunningProxy, content: str = "hello", *, key: str = "", **fields: Any) -> Answer:
    """Returns what the header says, and the answer."""
    body = {"model": "judge", "messages": [{"role": "user", "content": content}], **fields}
    headers = {"Authorization": f"Bearer {key or key_of(proxy)}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200
        return answer.headers.get("x-fulmen-cache"), await answer.read()


def counted(proxy: RunningProxy, outcome: str) -> float:
    return proxy.metric("shared_cache_total", outcome=outcome) or 0


async def until_stored(proxy: RunningProxy, count: int) -> None:
    async def stored() -> bool:
        return counted(proxy, "stored") >= count

    await eventually(stored)


@pytest.mark.parametrize("stream", [False, True])
async def test_what_one_proxy_was_answered_another_answers(
    pair: tuple[RunningProxy, RunningProxy], backend: Backend, redis: RedisServer, stream: bool
) -> None:
    one, two = pair
    first = await ask(one, "a secret word", stream=stream)
    await until_stored(one, 1)
    assert await ask(two, "a secret word", stream=stream) == ("hit", first[1])
    assert (counted(two, "hit"), counted(two, "miss")) == (1, 0)
    # From now on it is in the memory of both.
    await redis.stop()
    assert await ask(two, "a secret word", stream=stream) == ("hit", first[1])
    assert len(backend.received) == 1


async def test_other_projects_and_other_requests_have_nothing_of_it(
    pair: tuple[RunningProxy, RunningProxy], backend: Backend
) -> None:
    one, two = pair
    await ask(one, temperature=0)
    await until_stored(one, 1)
    assert (await ask(two, temperature=0, key=key_of(two, "projects/other")))[0] == "miss"
    assert (await ask(two, temperature=1))[0] == "miss"
    assert (await ask(two, temperature=0))[0] == "hit"
    assert len(backend.received) == 3


async def test_redis_has_neither_texts_nor_what_was_asked_and_forgets(
    pair: tuple[RunningProxy, RunningProxy], redis: RedisServer
) -> None:
    await ask(pair[0], "a secret word")
    await until_stored(pair[0], 1)
    async with redis.client() as client:
        [name] = await client.keys("*")
        assert b"secret word" not in await client.get(name)
        assert 0 < await client.pttl(name) <= 3600 * 1000


async def test_values_that_others_have_written_are_never_answers(
    pair: tuple[RunningProxy, RunningProxy], redis: RedisServer, backend: Backend
) -> None:
    one, two = pair
    contents = [f"question {number}" for number in range(5)]
    plain = [(await ask(one, content))[1] for content in contents]
    await until_stored(one, 5)
    async with redis.client() as client:
        names = sorted(await client.keys("*"))
        values = [await client.get(name) for name in names]
        await client.set(names[0], values[1])  # the answer to another question
        await client.set(names[1], values[1][:-1] + bytes([values[1][-1] ^ 1]))
        await client.set(names[2], b'{"choices": []}')
        await client.set(names[3], b"x" * 50_000_000)
        await client.delete(names[4])
        await client.rpush(names[4], "a list")
    for content, answer in zip(contents, plain, strict=True):
        header, body = await ask(two, content)
        assert header == "miss"
        assert json.loads(body)["choices"] == json.loads(answer)["choices"]
    assert len(backend.received) == 10
    assert counted(two, "hit") == 0
    assert (counted(two, "unreadable"), counted(two, "failed")) == (5, 0)


async def test_an_answer_that_is_too_large_stays_in_memory(
    pair: tuple[RunningProxy, RunningProxy], redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_answers, "MAX_ANSWER_BYTES", 1000)
    one, two = pair
    large = "x" * 2000
    await ask(one, large)
    assert counted(one, "not_stored") == 1
    assert (await ask(one, large))[0] == "hit"
    assert (await ask(two, large))[0] == "miss"
    async with redis.client() as client:
        assert await client.keys("*") == []


async def test_a_redis_that_is_frozen_or_gone_costs_the_miss_and_nothing_else(
    pair: tuple[RunningProxy, RunningProxy], redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    await ask(one)
    await until_stored(one, 1)
    redis.freeze()
    monkeypatch.setattr(shared_answers, "_DEADLINE_S", 0.05)
    assert (await ask(two))[0] == "miss"
    assert counted(two, "failed") == 1
    redis.thaw()
    await redis.stop()
    assert (await ask(two, "another"))[0] == "miss"
    assert (await ask(one))[0] == "hit"  # its own memory
    await redis.start()
    monkeypatch.setattr(shared_answers, "_DEADLINE_S", 10.0)
    number = 0

    async def is_back() -> bool:
        nonlocal number
        number += 1
        await ask(one, f"again {number}")
        return counted(one, "stored") >= 2

    await eventually(is_back)


async def test_tls_is_spoken_and_no_log_has_the_password(
    store: FakeStore, backend: Backend, tmp_path: Path, capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    authority = Authority(tmp_path)
    leaf = authority.issue("redis")
    async with (
        RedisServer(certificate=leaf.certificate, key=leaf.key, ca=authority.file) as redis,
        running_proxy(store.target, backend_url=backend.url, cache_url=redis.url) as one,
        running_proxy(store.target, cache_url=redis.url) as two,
        running_proxy(store.target, cache_url=redis.url.replace(PASSWORD, PASSWORD + "-wrong")) as wrong,
    ):
        await serve(one)
        await ask(one)
        await until_stored(one, 1)
        assert (await ask(two))[0] == "hit"
        assert (await ask(wrong))[0] == "miss"
        assert counted(wrong, "failed") == 1
    printed = capfd.readouterr()
    logged = printed.out + printed.err + caplog.text
    assert "shared_cache_failed" in logged
    assert PASSWORD not in logged
    settings = LlmProxySettings(dev_mode=True, host="127.0.0.1", cache_url=SecretStr(redis.url))
    assert PASSWORD not in repr(settings) + str(settings.model_dump())


async def test_a_url_that_is_wrong_or_a_package_that_is_missing_is_said_at_the_start(
    store: FakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("redis")
    with pytest.raises(StartupError, match="cache_url is not valid") as wrong:
        async with running_proxy(store.target, cache_url=f"memcached://:{PASSWORD}@cache"):
            pass
    assert PASSWORD not in str(wrong.value)
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(StartupError, match=r"fulmen-llm-proxy\[cache\]"):
        async with running_proxy(store.target, cache_url="redis://127.0.0.1"):
            pass


def test_the_package_is_not_imported_without_the_setting() -> None:
    program = "import sys, fulmen_llm_proxy.app; sys.exit('redis' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=os.environ, check=False, timeout=60).returncode == 0
