"""Model calls carry the attempt's key and the span that makes them, whatever HTTP client an agent uses."""

from __future__ import annotations

from tests.support.runner.fixtures import World
from tests.support.runner.harness import rollouts_of

AGENT = """
import asyncio, json, os, urllib.request
import aiohttp, httpx2, requests, urllib3
from opentelemetry import trace

URL = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "who am I?"}]}
HEADERS = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
session = requests.Session()
pool = urllib3.PoolManager()
tracer = trace.get_tracer("an-agent")

def by_requests():
    return session.post(URL, json=BODY, headers=HEADERS).json()

def by_urllib3():
    return pool.request("POST", URL, body=json.dumps(BODY), headers=HEADERS).json()

def by_urllib():
    request = urllib.request.Request(URL, data=json.dumps(BODY).encode(), headers=HEADERS, method="POST")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

def by_httpx2():
    return httpx2.post(URL, json=BODY, headers=HEADERS).json()

async def by_aiohttp():
    async with aiohttp.ClientSession() as client, client.post(URL, json=BODY, headers=HEADERS) as answer:
        return await answer.json()

async def solve(task, context):
    with tracer.start_as_current_span(task):
        if task == "by_aiohttp":
            answer = await by_aiohttp()
        else:
            answer = await asyncio.to_thread(globals()[task])
    return float(answer["choices"][0]["message"]["content"] == context.attempt)
"""
CLIENTS = ["by_aiohttp", "by_httpx2", "by_requests", "by_urllib", "by_urllib3"]


async def test_a_call_by_any_client_has_the_attempts_key_and_lies_below_its_span(world: World) -> None:
    agent = await world.publish({"agent.py": AGENT}, python="agent.py:solve")
    await world.start()
    names = await world.store.create(rollouts_of(agent, list(CLIENTS) * 4))

    ended = await world.store.ended(names)

    for name in names:
        [attempt] = ended[name]
        assert (attempt.kind, attempt.message, attempt.rewards) == ("", "", {("reward", None): 1.0})
    spans = {span.trace_id.hex(): span.span_id.hex() for span in world.double.otlp_spans}
    told = {header.split("-")[1]: header.split("-")[2] for header in world.proxy.traceparents.values()}
    assert told == spans
    assert len(told) == len(names)
