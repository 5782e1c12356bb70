"""Replicas are killed and stopped, and the store is frozen, under the vendor's own clients: every caller ends well."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import openai
import pytest

from fulmen.errors import FulmenError
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.balancer import Balancer
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, SIGNING_KEY, running_proxy
from tests.support.llm_proxy.proxy_process import ProxyProcess, new_attempt, proxy_process

DEADLINE_S = 90
CALLERS = 32
MESSAGES = [{"role": "user", "content": "hello"}]
_STORE = """
import asyncio
from tests.support.llm_proxy.fake_store import FakeStore
async def main():
    async with FakeStore() as store:
        print(store.target, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@asynccontextmanager
async def replicas(
    store_target: str, folder: Path, count: int, **settings: object
) -> AsyncIterator[list[ProxyProcess]]:
    """Runs proxies that have heard their routes."""
    async with asyncio.timeout(DEADLINE_S):
        running = [
            proxy_process(store_target, folder / f"ready-{number}", signing_key=SIGNING_KEY, **settings)
            for number in range(count)
        ]
        proxies = await asyncio.gather(*(one.__aenter__() for one in running))
    try:
        async with asyncio.timeout(DEADLINE_S):
            for proxy in proxies:
                while (await proxy.chat(new_attempt()[1], "warm", model=MODEL))[0] != 200:
                    pass
        yield list(proxies)
    finally:
        await asyncio.gather(*(one.__aexit__(None, None, None) for one in running))


@pytest.fixture
async def routed(store: FakeStore, backend: Backend) -> FakeStore:
    """Returns the store with a route to the backend in it."""
    async with running_proxy(store.target, backend_url=backend.url):
        pass
    return store


async def all_arrived(backend: Backend, calls: int) -> None:
    for _ in range(calls):
        await backend.arrived.acquire()


def forget(backend: Backend) -> None:
    backend.received.clear()
    backend.arrived = asyncio.Semaphore(0)


@pytest.mark.long(short=True)
async def test_a_killed_replica_fails_its_calls_in_flight_and_no_other_and_every_caller_ends_well(
    routed: FakeStore, backend: Backend, tmp_path: Path
) -> None:
    agents = [new_attempt() for _ in range(CALLERS)]
    async with (
        asyncio.timeout(DEADLINE_S),
        replicas(routed.target, tmp_path, 2) as (doomed, other),
        Balancer([doomed.ports["http_port"], other.ports["http_port"]]) as balancer,
    ):

        async def call(key: str, retries: int) -> str | None:
            async with openai.AsyncOpenAI(base_url=balancer.url, api_key=key, max_retries=retries) as client:
                answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
                return answer.choices[0].message.content

        forget(backend)
        backend.switches.gate = asyncio.Event()
        # Half of the callers try again by themselves; the others show what they would see.
        calls = [asyncio.create_task(call(key, 3 * (number % 2))) for number, (_, key) in enumerate(agents)]
        await all_arrived(backend, CALLERS)
        lost = int(await doomed.metric("fulmen_llm_proxy_calls_in_flight"))
        assert 0 < lost < CALLERS
        await doomed.kill()
        backend.switches.gate.set()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        after = await asyncio.gather(*(call(key, 3) for _, key in agents))
        summaries = await other.flush([name for name, _ in agents], timeout=20)
    failed = [one for one in ended if isinstance(one, BaseException)]
    assert {type(one) for one in failed} <= {openai.APIConnectionError}
    assert not [one for one in ended[1::2] if one != "You said: hello"]
    resent = len(backend.received) - 2 * CALLERS
    assert len(failed) + resent == lost
    assert set(after) == {"You said: hello"}
    # The attempts whose calls were in flight there are known, and no others.
    assert sum(one.lost for one in summaries) == lost
    assert sum(one.call_count for one in summaries) == 2 * CALLERS - len(failed) + lost
    assert sum(one.infra_failure_count for one in summaries) == 0


async def test_a_replica_that_is_told_to_stop_cuts_no_stream_within_its_grace(
    routed: FakeStore, backend: Backend, tmp_path: Path
) -> None:
    attempt, key = new_attempt()
    async with asyncio.timeout(DEADLINE_S), replicas(routed.target, tmp_path, 1, drain_grace_s=30) as (proxy,):
        forget(backend)
        backend.switches.gate, backend.switches.gate_at = asyncio.Event(), 3
        begun = asyncio.Semaphore(0)

        async def stream() -> str:
            async with openai.AsyncOpenAI(base_url=proxy.url, api_key=key, max_retries=0) as client:
                answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
                said = ""
                async for chunk in answer:
                    begun.release()
                    said += chunk.choices[0].delta.content or ""
                assert chunk.choices[0].finish_reason == "stop"
                return said

        calls = [asyncio.create_task(stream()) for _ in range(CALLERS)]
        await all_arrived(backend, CALLERS)
        for _ in range(2 * CALLERS):
            await begun.acquire()
        proxy.process.send_signal(signal.SIGTERM)
        while await _is_listening(proxy.ports["http_port"]):  # noqa: ASYNC110 - state of another process
            await asyncio.sleep(0.05)
        backend.switches.gate.set()
        assert set(await asyncio.gather(*calls)) == {"You said: hello"}
        assert await proxy.process.wait() == 0
    assert not any("drain_cut_short" in line for line in proxy.log)
    spans = routed.spans(attempt)
    assert len(spans) == CALLERS
    assert all(record is not None and record.usable for _, record in spans)


async def _is_listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionError:
        return False
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()
    return True


async def test_while_the_store_is_frozen_calls_go_on_and_their_captures_arrive_later(
    backend: Backend, tmp_path: Path
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        _STORE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])},
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            assert process.stdout is not None
            store_target = (await process.stdout.readline()).decode().strip()
            async with running_proxy(store_target, backend_url=backend.url):
                pass
            async with replicas(store_target, tmp_path, 1) as (proxy,):
                await _through_a_freeze(proxy, process)
    finally:
        process.kill()
        await process.wait()


async def _through_a_freeze(proxy: ProxyProcess, store: asyncio.subprocess.Process) -> None:
    known, new = [new_attempt() for _ in range(4)], [new_attempt() for _ in range(4)]

    async def talk(key: str, calls: int) -> None:
        async with openai.AsyncOpenAI(base_url=proxy.url, api_key=key, max_retries=0) as client:
            for _ in range(calls):
                await client.chat.completions.create(model=MODEL, messages=MESSAGES)

    load = [asyncio.create_task(talk(key, 20)) for _, key in known]
    await talk(known[0][1], 1)
    store.send_signal(signal.SIGSTOP)
    await asyncio.gather(*load, *(talk(key, 10) for _, key in new))
    names = [name for name, _ in known + new]
    with pytest.raises((FulmenError, AssertionError)):
        assert all(one.flushed for one in await proxy.flush(names, timeout=0.5))
    store.send_signal(signal.SIGCONT)
    summaries = await proxy.flush(names, timeout=60)
    assert all(one.flushed for one in summaries)
    assert sum(one.call_count for one in summaries) == 4 * 20 + 1 + 4 * 10
    assert {(one.infra_failure_count, one.unusable_count) for one in summaries} == {(0, 0)}
