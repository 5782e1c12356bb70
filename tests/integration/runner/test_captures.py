"""The runner's questions to the model proxies, gathered into few calls."""

from __future__ import annotations

import asyncio
import time

import pytest

from fulmen.rpc.channel import open_channel
from fulmen_runner.attempts.captures import CaptureClient, ProxyCaptures
from fulmen_runner.attempts.classification import CaptureEvidence
from fulmen_runner.attempts.errors import CapturesUnavailable
from tests.support.runner.harness import SIGNING_KEY
from tests.support.runner.proxy_double import ProxyDouble

ATTEMPTS = [f"projects/default/rollouts/01890000-0000-7000-8000-{n:012d}/attempts/1" for n in range(300)]


SLOW = "fulmen_runner.attempts.captures.SLOW_S"
AT_ALL_S = 60.0
"""When an answer is late: never, for tests in which only a proxy that is away counts, however busy the machine is."""


def captures_of(*proxies: ProxyDouble, reach_s: float = 20.0, flush_s: float = 20.0) -> CaptureClient:
    clients = []
    for proxy in proxies:
        target = f"127.0.0.1:{proxy.grpc_port}"
        clients.append(ProxyCaptures(target=target, channel=open_channel(target)))
    return CaptureClient(proxies=tuple(clients), reach_s=reach_s, flush_s=flush_s)


async def close(captures: CaptureClient) -> None:
    for proxy in captures.proxies:
        await proxy.close()


async def test_many_attempts_are_flushed_in_few_calls(proxy: ProxyDouble) -> None:
    captures = captures_of(proxy)
    proxy.calls[ATTEMPTS[7]] = 3
    found = await asyncio.gather(*(captures.flush(attempt) for attempt in ATTEMPTS))
    assert [evidence.call_count for evidence in found] == [3 if n == 7 else 0 for n in range(300)]
    assert proxy.flush_call_count <= 3
    await close(captures)


async def test_a_proxy_is_asked_once_by_all_who_wait_to_reach_it(proxy: ProxyDouble) -> None:
    captures = captures_of(proxy)
    await asyncio.gather(*(captures.reach() for _ in range(100)))
    assert proxy.flush_call_count == 1
    await close(captures)


async def test_any_proxy_answers_for_all_and_the_next_one_is_asked_when_one_is_gone(
    proxy: ProxyDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ProxyDouble(signing_key=SIGNING_KEY)
    await other.start_grpc()
    proxy.calls[ATTEMPTS[0]] = other.calls[ATTEMPTS[0]] = 3
    captures = captures_of(proxy, other)
    with monkeypatch.context() as patched:
        patched.setattr(SLOW, AT_ALL_S)
        assert (await captures.flush(ATTEMPTS[0])).call_count == 3
    assert (proxy.flush_call_count, other.flush_call_count) == (1, 0)
    await proxy.stop_grpc()
    assert (await captures.flush(ATTEMPTS[0])).call_count == 3
    await captures.reach()
    await close(captures)
    await other.close()


async def test_lost_captures_are_reported(proxy: ProxyDouble) -> None:
    captures = captures_of(proxy)
    proxy.lost = True
    assert (await captures.flush(ATTEMPTS[0])).lost
    await close(captures)


async def test_a_flush_waits_for_a_proxy_that_is_away_for_a_moment(proxy: ProxyDouble) -> None:
    captures = captures_of(proxy)
    await proxy.stop_grpc()
    waiting = asyncio.create_task(captures.flush(ATTEMPTS[0]))
    await asyncio.sleep(0)
    await proxy.start_grpc()
    assert not (await waiting).lost
    await close(captures)


async def test_a_proxy_that_did_not_answer_for_a_moment_is_reported(
    proxy: ProxyDouble, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SLOW, AT_ALL_S)
    captures, started = captures_of(proxy), time.monotonic()
    assert (await captures.flush(ATTEMPTS[0])).unreachable_at < started
    await proxy.stop_grpc()
    waiting = asyncio.create_task(captures.flush(ATTEMPTS[0]))
    async with asyncio.timeout(20):
        while captures.proxies[0].unreachable_at < started:  # noqa: ASYNC110  # state of the client under test
            await asyncio.sleep(0.01)
    await proxy.start_grpc()
    assert (await waiting).unreachable_at >= started
    await close(captures)


async def test_an_answer_that_came_late_is_reported(proxy: ProxyDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    captures, started = captures_of(proxy), time.monotonic()
    monkeypatch.setattr(SLOW, 0.0)
    assert (await captures.flush(ATTEMPTS[0])).unreachable_at >= started
    await close(captures)


@pytest.mark.parametrize("away", [True, False])
async def test_what_is_not_confirmed_in_time_is_unavailable(proxy: ProxyDouble, away: bool) -> None:
    captures = captures_of(proxy, reach_s=0.3, flush_s=0.3)
    proxy.confirming = False
    if away:
        await proxy.stop_grpc()
        with pytest.raises(CapturesUnavailable, match="is unreachable"):
            await captures.reach()
    started = time.monotonic()
    with pytest.raises(CapturesUnavailable):
        await captures.flush(ATTEMPTS[0])
    assert time.monotonic() - started >= 0.3
    await close(captures)


async def test_without_proxies_there_is_nothing_to_wait_for() -> None:
    captures = captures_of()
    await captures.reach()
    assert await captures.flush(ATTEMPTS[0]) == CaptureEvidence()
