"""Equal requests on cached routes are answered from memory, byte for byte, and never those of training."""

from __future__ import annotations

from typing import Any

import pytest

from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import RunningProxy, target

Answer = tuple[str | None, bytes]


@pytest.fixture
async def cached(proxy: RunningProxy) -> RunningProxy:
    """Returns a proxy with a cached route `judge`."""
    await put(proxy, cached=True)
    return proxy


async def put(proxy: RunningProxy, **fields: Any) -> None:
    route = route_pb2.Route(name="routes/judge", targets=[target("one", policy="")], **fields)
    await proxy.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))


async def ask(proxy: RunningProxy, key: str, content: str = "hello", **fields: Any) -> Answer:
    """Returns what the header says, and the answer."""
    body = {"model": "judge", "messages": [{"role": "user", "content": content}], **fields}
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 200
        return answer.headers.get("x-fulmen-cache"), await answer.read()


async def test_an_equal_request_is_answered_from_memory(cached: RunningProxy, backend: Backend) -> None:
    _, key = cached.attempt(mode="test")
    first = await ask(cached, key, temperature=0, user="me", metadata={"run": "1"})
    again = await ask(cached, key, metadata={"run": "2"}, temperature=0)
    assert (first[0], again) == ("miss", ("hit", first[1]))
    for other in ({"temperature": 1}, {"temperature": 0, "seed": 1}, {"temperature": 0, "unknown_field": []}):
        assert (await ask(cached, key, **other))[0] == "miss"
    assert (await ask(cached, key, "hullo", temperature=0))[0] == "miss"
    assert len(backend.received) == 5


async def test_a_stream_is_replayed_as_a_stream_and_a_whole_answer_whole(
    cached: RunningProxy, backend: Backend
) -> None:
    _, key = cached.attempt(mode="validation")
    for fields in ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}):
        first, again = [await ask(cached, key, **fields) for _ in range(2)]
        assert (first[0], again) == ("miss", ("hit", first[1]))
    assert len(backend.received) == 3
    assert b"[DONE]" in first[1]


async def test_training_calls_uncached_routes_and_other_projects_have_nothing_of_it(
    cached: RunningProxy, backend: Backend
) -> None:
    _, key = cached.attempt(mode="train")
    assert [(await ask(cached, key))[0] for _ in range(2)] == [None, None]
    keys = [cached.signer.issue(Role.CLIENT, subject="c", ttl_s=60, project=f"projects/{name}") for name in "ab"]
    assert [(await ask(cached, one))[0] for one in [*keys, *keys]] == ["miss", "miss", "hit", "hit"]
    await put(cached)
    assert (await ask(cached, keys[0]))[0] is None
    assert len(backend.received) == 5


async def test_refusals_and_answers_that_break_off_are_not_kept(cached: RunningProxy, backend: Backend) -> None:
    _, key = cached.attempt(mode="test")
    backend.switches.cut_after_events = 3
    assert b"backend_unavailable" in (await ask(cached, key, stream=True))[1]
    backend.switches.cut_after_events = None
    assert (await ask(cached, key, stream=True))[0] == "miss"
    backend.switches.refusals.append(400)
    body = {"model": "judge", "messages": [{"role": "user", "content": "refused"}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with cached.http.post(f"{cached.url}/chat/completions", json=body, headers=headers) as answer:
        assert answer.status == 400
    assert (await ask(cached, key, "refused"))[0] == "miss"


async def test_what_a_hit_costs_is_counted_for_nobody_and_its_span_is_kept(
    cached: RunningProxy, store: FakeStore
) -> None:
    attempt, key = cached.attempt(mode="test")
    for _ in range(2):
        await ask(cached, key)
    summary = await cached.flush(attempt)
    assert (summary.call_count, summary.unusable_count, len(store.spans(attempt))) == (2, 0, 2)
