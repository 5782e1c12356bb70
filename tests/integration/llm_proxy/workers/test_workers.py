"""Several processes behind one pair of ports look like one proxy, and outlive each other."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fulmen.errors import FulmenError
from fulmen.llm_proxy.v1 import (
    backend_service_pb2,
    backend_service_pb2_grpc,
    capture_service_pb2,
    capture_service_pb2_grpc,
)
from fulmen.rpc.channel import open_channel
from fulmen_service_kit.security.keys import attempt_secrets
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, SIGNING_KEY, running_proxy
from tests.support.llm_proxy.proxy_process import ProxyProcess, new_attempt, proxy_process

DEADLINE_S = 90
WORKERS = 2
HUNG_AFTER_S = 3.0
SOON_HUNG = f"from fulmen_service_kit import heartbeat; heartbeat.HUNG_AFTER_S = {HUNG_AFTER_S}; heartbeat.main()"
"""What runs a proxy in a container, with a silence that is noticed sooner."""
CONNECTIONS = 24
"""Over two workers: all at one of them once in eight million runs."""


@pytest.fixture
async def proxy(store: FakeStore, backend: Backend, tmp_path: Path) -> AsyncIterator[ProxyProcess]:
    """Yields a proxy of two workers that have heard their routes."""
    async with running_proxy(store.target, backend_url=backend.url):
        pass
    ready = tmp_path / "ready.json"
    async with proxy_process(store.target, ready, signing_key=SIGNING_KEY, workers=WORKERS) as running:
        async with asyncio.timeout(DEADLINE_S):
            for _ in range(CONNECTIONS):
                while await one_call(running, new_attempt()[1]) == 503:
                    pass
        yield running


async def one_call(proxy: ProxyProcess, key: str) -> int:
    """Makes a call on a connection of its own."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer,
    ):
        await answer.read()
        return answer.status


async def calls_by_worker(proxy: ProxyProcess) -> dict[str, float]:
    async with proxy.http.get(f"{proxy.operator_url}/metrics") as answer:
        page = await answer.text()
    calls: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        if family.name == "fulmen_llm_proxy_calls":
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    worker = sample.labels["worker"]
                    calls[worker] = calls.get(worker, 0) + sample.value
    return calls


async def flushed(proxy: ProxyProcess, attempt: str) -> capture_service_pb2.FlushCapturesResponse:
    async with open_channel(f"127.0.0.1:{proxy.ports['port']}", token=proxy.token) as channel:
        request = capture_service_pb2.FlushCapturesRequest(attempts=[attempt])
        return await capture_service_pb2_grpc.CaptureServiceStub(channel).FlushCaptures(request, timeout=20)


async def in_flight(proxy: ProxyProcess) -> int:
    """Asks on a connection of its own, so at a worker by chance."""
    async with open_channel(f"127.0.0.1:{proxy.ports['port']}", token=proxy.token) as channel:
        stub = backend_service_pb2_grpc.BackendServiceStub(channel)
        answer = await stub.GetBackendHealth(backend_service_pb2.GetBackendHealthRequest(), timeout=20)
    [one] = answer.backends
    assert one.name == "backends/one"
    return int(one.in_flight_count)


def workers_of(proxy: ProxyProcess) -> list[psutil.Process]:
    return psutil.Process(proxy.process.pid).children()


async def calls_at(backend: Backend, proxy: ProxyProcess, key: str) -> list[asyncio.Task[int]]:
    """Begins a call on each connection; returns when the backend has all of them, which wait at its gate."""
    backend.switches.gate = asyncio.Event()
    while backend.arrived.locked() is False:
        await backend.arrived.acquire()
    calls = [asyncio.create_task(one_call(proxy, key)) for _ in range(CONNECTIONS)]
    for _ in calls:
        await backend.arrived.acquire()
    return calls


async def test_every_worker_takes_calls_and_any_of_them_flushes_and_counts_them_all(
    proxy: ProxyProcess, store: FakeStore
) -> None:
    attempt, key = new_attempt()
    async with asyncio.timeout(DEADLINE_S):
        before = sum((await calls_by_worker(proxy)).values())
        for _ in range(CONNECTIONS):
            assert await one_call(proxy, key) == 200
        after = await calls_by_worker(proxy)
        assert set(after) == {"0", "1"}
        assert min(after.values()) > 0
        assert sum(after.values()) == before + CONNECTIONS
        [summary] = (await flushed(proxy, attempt)).summaries
    assert (summary.flushed, summary.call_count, summary.unusable_count) == (True, CONNECTIONS, 0)
    assert len(store.spans(attempt)) == CONNECTIONS


async def test_any_worker_tells_of_the_calls_that_all_of_them_have_at_a_backend(
    proxy: ProxyProcess, backend: Backend
) -> None:
    _, key = new_attempt()
    async with asyncio.timeout(DEADLINE_S):
        calls = await calls_at(backend, proxy, key)
        for _ in range(WORKERS * 2):
            assert await in_flight(proxy) == CONNECTIONS
        backend.switches.gate.set()
        assert set(await asyncio.gather(*calls)) == {200}
        while await in_flight(proxy):  # noqa: ASYNC110  # state of another process
            await asyncio.sleep(0.02)


async def test_a_killed_worker_is_started_again_and_the_others_go_on(proxy: ProxyProcess) -> None:
    attempt, key = new_attempt()
    killed = workers_of(proxy)[0]
    async with asyncio.timeout(DEADLINE_S):
        killed.kill()
        answered = 0
        while answered < CONNECTIONS:
            try:
                answered += await one_call(proxy, key) == 200
            except aiohttp.ClientConnectionError:
                continue  # in flight at the one that was killed
        while killed.is_running() or len(workers_of(proxy)) < WORKERS:  # noqa: ASYNC110  # state of another process
            await asyncio.sleep(0.05)
        while True:
            with suppress(FulmenError):  # a connection to a worker that is not ready yet
                [summary] = (await flushed(proxy, attempt)).summaries
                break
    assert (summary.flushed, summary.call_count) == (True, CONNECTIONS)


async def test_a_stopped_worker_is_replaced(proxy: ProxyProcess) -> None:
    attempt, _ = new_attempt()
    stopped = workers_of(proxy)[0]
    async with asyncio.timeout(DEADLINE_S):
        stopped.suspend()
        while stopped.is_running() or len(workers_of(proxy)) < WORKERS:  # noqa: ASYNC110  # state of another process
            await asyncio.sleep(0.05)
        assert (await flushed(proxy, attempt)).summaries[0].flushed


async def test_a_stop_lets_every_worker_finish_and_leaves_no_process_behind(
    proxy: ProxyProcess, backend: Backend, store: FakeStore
) -> None:
    attempt, key = new_attempt()
    workers = workers_of(proxy)
    async with asyncio.timeout(DEADLINE_S):
        calls = await calls_at(backend, proxy, key)
        proxy.process.send_signal(signal.SIGTERM)
        backend.switches.gate.set()
        assert set(await asyncio.gather(*calls)) == {200}
        assert await proxy.process.wait() == 0
    assert not any(worker.is_running() for worker in workers)
    assert len(store.spans(attempt)) == CONNECTIONS


async def test_a_stop_that_waits_for_calls_is_not_taken_for_a_hang(
    store: FakeStore, backend: Backend, tmp_path: Path
) -> None:
    async with running_proxy(store.target, backend_url=backend.url):
        pass
    keeper = [sys.executable, "-c", SOON_HUNG]
    async with (
        proxy_process(
            store.target, tmp_path / "ready.json", signing_key=SIGNING_KEY, workers=WORKERS, keeper=keeper
        ) as proxy,
        asyncio.timeout(DEADLINE_S),
    ):
        _, key = new_attempt()
        while await one_call(proxy, key) == 503:
            pass
        calls = await calls_at(backend, proxy, key)
        proxy.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(HUNG_AFTER_S + 1)
        backend.switches.gate.set()
        assert set(await asyncio.gather(*calls)) == {200}
        assert await proxy.process.wait() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends children of a killed process on Linux only")
async def test_a_killed_supervisor_takes_its_workers_along(proxy: ProxyProcess) -> None:
    workers = workers_of(proxy)
    await proxy.kill()
    gone, alive = await asyncio.to_thread(psutil.wait_procs, workers, timeout=20)
    assert (len(gone), alive) == (WORKERS, [])


async def test_workers_that_cannot_start_end_the_start_with_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {
        "PATH": os.environ["PATH"],
        "FULMEN_LLM_PROXY_ATTEMPT_KEY_SECRET": attempt_secrets(SIGNING_KEY),
        "FULMEN_LLM_PROXY_PORT": "0",
        "FULMEN_LLM_PROXY_HTTP_PORT": "0",
        "FULMEN_LLM_PROXY_METRICS_PORT": "0",
        "FULMEN_LLM_PROXY_WORKERS": str(WORKERS),
        "FULMEN_LLM_PROXY_SPOOL_DIR": str(tmp_path / "file" / "spool"),
    }
    async with asyncio.timeout(DEADLINE_S):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "fulmen_llm_proxy", "serve", env=environment, stderr=asyncio.subprocess.PIPE
        )
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert b"spool_dir" in errors
    assert b"before it served" in errors
