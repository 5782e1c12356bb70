"""What operators see of calls: figures with bounded labels, and one trace from the agent to the backend."""

from __future__ import annotations

import asyncio

from fulmen.ids import trace_id_of
from fulmen.llm_proxy.v1 import route_service_pb2
from tests.support.llm_proxy.backend import Backend, prompt_ids_of, reply_to, token_ids_of
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, POLICY, RunningProxy, target

DEADLINE_S = 30
MESSAGES = [{"role": "user", "content": "hello"}]
HERE = {"model": MODEL, "backend": "one"}


async def stream(proxy: RunningProxy, key: str, **headers: str) -> bytes:
    body = {"model": MODEL, "messages": MESSAGES, "stream": True}
    headers = {"Authorization": f"Bearer {key}", **headers}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        return await answer.content.read()


async def test_calls_are_counted_by_model_and_backend(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    await proxy.chat(key, "hello")
    await stream(proxy, key)
    tokens = len(token_ids_of(reply_to(MESSAGES)))
    assert proxy.metric("calls_total", api="chat_completions", status="200", **HERE) == 2
    assert proxy.metric("tokens_total", kind="prompt", **HERE) == 2 * len(prompt_ids_of(MESSAGES))
    assert proxy.metric("tokens_total", kind="completion", **HERE) == 2 * tokens
    assert proxy.metric("call_seconds_count", **HERE) == 2
    assert proxy.metric("first_token_seconds_count", **HERE) == 2
    assert proxy.metric("inter_token_seconds_count", **HERE) == 1  # of the stream, once
    assert proxy.metric("inter_token_seconds_bucket", le="+Inf", **HERE) == 1
    assert proxy.metric("calls_in_flight") == 0


async def test_errors_are_counted_by_cause_and_by_whose_they_are(proxy: RunningProxy, backend: Backend) -> None:
    _, key = proxy.attempt()
    backend.switches.refusals.append(400)
    assert (await proxy.chat(key))[0] == 400
    assert (await proxy.chat(key, model="no-such-model"))[0] == 404
    backend.switches.gate = asyncio.Event()
    async with asyncio.timeout(DEADLINE_S):
        call = asyncio.create_task(stream(proxy, key))
        await backend.arrived.acquire()
        await backend.arrived.acquire()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await backend.aborted.acquire()
        while proxy.metric("calls_in_flight") != 0:  # noqa: ASYNC110  # a gauge tells nobody
            await asyncio.sleep(0.01)
    assert proxy.metric("errors_total", cause="backend_400", side="backend") == 1
    assert proxy.metric("errors_total", cause="route_not_found", side="caller") == 1
    assert proxy.metric("errors_total", cause="caller_gone", side="caller") == 1


async def test_no_label_comes_from_what_a_caller_wrote_and_figures_leave_with_their_route(proxy: RunningProxy) -> None:
    _, key = proxy.attempt()
    for number in range(5):
        await proxy.chat(key, model=f"made-up-{number}")
    await proxy.put_route(target("one"), model="other")
    await proxy.chat(key, model="other")
    models = {
        sample.labels["model"]
        for family in proxy.registry.collect()
        for sample in family.samples
        if "model" in sample.labels
    }
    assert models == {"", "other", MODEL}  # nowhere, a call, a policy's version
    assert proxy.metric("call_seconds_count", model="other", backend="one") == 1
    await proxy.routes.DeleteRoute(route_service_pb2.DeleteRouteRequest(name="routes/other"))
    assert proxy.metric("call_seconds_count", model="other", backend="one") is None


async def test_the_version_of_each_policy_is_shown(proxy: RunningProxy) -> None:
    assert proxy.metric("policy_version", policy=POLICY, model=MODEL) == 1
    await proxy.put_route(target("one", version=7))
    assert proxy.metric("policy_version", policy=POLICY, model=MODEL) == 7


async def test_the_span_of_a_call_is_between_the_agents_and_the_backends(
    proxy: RunningProxy, store: FakeStore, backend: Backend
) -> None:
    attempt, key = proxy.attempt()
    trace_id, agents_span = "ab" * 16, "cd" * 8
    await stream(proxy, key, traceparent=f"00-{trace_id}-{agents_span}-01")
    await proxy.chat(key)
    await proxy.flush(attempt)
    named, unnamed = [span for span, _ in store.spans(attempt)]
    told = [request.headers["traceparent"] for request in backend.received]
    assert (named.trace_id.hex(), named.parent_span_id.hex()) == (trace_id, agents_span)
    assert told[0] == f"00-{trace_id}-{named.span_id.hex()}-01"
    assert unnamed.trace_id.hex() == trace_id_of(attempt)
    assert told[1] == f"00-{unnamed.trace_id.hex()}-{unnamed.span_id.hex()}-01"
