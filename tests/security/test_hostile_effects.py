"""Declared effects asked for by hostile agents: each request is answered or refused by a message, and belongs to its attempt."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from fulmen.store.v1 import lease_pb2
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, Stubs, create

TOKEN = "0123456789abcdef"


@pytest.fixture
def store_settings() -> dict[str, Any]:
    return {"lease_ttl_s": 3600.0}


@pytest.fixture
async def proxy(store: StoreHandle) -> AsyncIterator[RunningProxy]:
    async with running_proxy(store.target, signing_key=SIGNING_KEY) as running:
        yield running


async def taken(stubs: Stubs) -> lease_pb2.Assignment:
    await create(stubs)
    (assignment,) = await (await Runner(stubs).open()).take(1)
    return assignment


async def posted(proxy: RunningProxy, assignment: lease_pb2.Assignment, body: bytes) -> tuple[int, str]:
    headers = {"x-api-key": assignment.attempt_key}
    async with proxy.http.post(f"{proxy.url}/effects", data=body, headers=headers) as answer:
        return answer.status, await answer.text()


def body_of(*, name: bytes = b'"book"', key: bytes = b'"1"', result: bytes | None = None) -> bytes:
    ending = b"" if result is None else b', "result": %s' % result
    return b'{"token": "%s", "name": %s, "key": %s%s}' % (TOKEN.encode(), name, key, ending)


HOSTILE = {
    "long key": body_of(key=b'"%s"' % (b"k" * 1_000_000)),
    "long name": body_of(name=b'"%s"' % (b"n" * 1_000_000)),
    "half of a pair": body_of(key=b'"\\ud800"'),
    "nul": body_of(key=b'"\\u0000"'),
    "not utf-8": body_of(key=b'"\xff"'),
    "not json": b"\x00",
    "a list": b"[]",
    "nothing": b"",
    "deep": b"[" * 100_000,
    "deep result": body_of(result=b"[" * 100_000 + b"]" * 100_000),
    "deep enough": body_of(result=b"[" * 950 + b"]" * 950),
    "nan": body_of(result=b"NaN"),
    "large result": body_of(result=b'"%s"' % (b"x" * 65_536)),
    "half in a result": body_of(result=b'"\\ud800"'),
    "result not utf-8": body_of(result=b'"\xff"'),
    "numbers": b'{"token": 1, "name": 2, "key": 3}',
    "never begun": body_of(result=b"1"),
}


async def test_whatever_an_agent_sends_is_refused_by_a_message(stubs: Stubs, proxy: RunningProxy) -> None:
    assignment = await taken(stubs)
    for kind, body in HOSTILE.items():
        status, text = await posted(proxy, assignment, body)
        assert (status, kind) == (400, kind), text[:500]
        assert len(text) < 1000, kind
    begun = await posted(proxy, assignment, body_of())
    assert begun[0] == 200
    assert '"begun"' in begun[1]
    for kind, body in HOSTILE.items():
        if b"result" in body and kind != "never begun":
            status, text = await posted(proxy, assignment, body)
            assert (status, kind) == (400, kind), text[:500]


async def test_an_attempt_ends_no_effect_that_another_token_began_and_none_of_another_rollout(
    stubs: Stubs, proxy: RunningProxy
) -> None:
    one, other = await taken(stubs), await taken(stubs)
    assert (await posted(proxy, one, body_of()))[0] == 200
    forged = body_of(result=b'"forged"')
    status, text = await posted(proxy, other, forged)
    assert status == 400, text
    status, text = await posted(proxy, one, forged.replace(TOKEN.encode(), TOKEN[::-1].encode()))
    assert (status, "no effect was begun" in text) == (400, True)
    named = forged.replace(b'{"token"', b'{"attempt": "%s", "token"' % one.attempt.encode())
    assert (await posted(proxy, other, named))[0] == 400
