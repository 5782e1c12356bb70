"""What the head of an answer tells: the request's id, who answered, how often was tried, and the cost."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import anthropic
import openai
import pytest

from tests.support.llm_proxy.harness import RunningProxy
from tests.support.llm_proxy.rogue_backend import CHAT, MESSAGES, answers, response
from tests.support.llm_proxy.rogue_world import CLAUDE, OPENAI, TINY, RogueWorld, request_of, rogue_world
from tests.support.llm_proxy.vendor_world import CLAUDE as ANTHROPIC
from tests.support.llm_proxy.vendor_world import ENGINE, GPT, VendorWorld

HELLO = [{"role": "user", "content": "hello"}]
ID = re.compile("[0-9a-f]{16}")


@pytest.fixture
async def rogue() -> AsyncIterator[RogueWorld]:
    """Yields a proxy that knows the price of a model."""
    async with rogue_world(prices={OPENAI: {"input": 1, "output": 10}}) as running:
        yield running


async def test_an_answer_names_its_attempt_backend_version_tries_and_cost(rogue: RogueWorld) -> None:
    attempt, key = rogue.proxy.attempt()
    plain = await rogue.post(CHAT, request_of(CHAT, OPENAI), key)
    told = {name.lower(): value for name, value in plain.headers.items() if name.lower().startswith("x-fulmen-")}
    assert ID.fullmatch(told.pop("x-fulmen-request-id"))
    assert told == {
        "x-fulmen-attempt": attempt,
        "x-fulmen-backend": "openai",
        "x-fulmen-tries": "1",
        "x-fulmen-cost-usd": "0.000022000",
    }
    trained = await rogue.post(CHAT, request_of(CHAT, TINY), key)
    assert (trained.headers["x-fulmen-policy-version"], trained.headers["x-fulmen-backend"]) == ("1", "engine")
    assert "x-fulmen-cost-usd" not in trained.headers, "its model has no price"


async def test_a_stream_tells_the_same_but_its_cost_which_is_not_known_yet(rogue: RogueWorld) -> None:
    attempt, key = rogue.proxy.attempt()
    for path, model, backend in (
        (CHAT, OPENAI, "openai"),
        (MESSAGES, CLAUDE, "anthropic"),
        (CHAT, CLAUDE, "anthropic"),
    ):
        answer = await rogue.post(path, request_of(path, model) | {"stream": True}, key)
        assert answer.headers["x-fulmen-backend"] == backend
        assert answer.headers["x-fulmen-attempt"] == attempt
        assert "x-fulmen-cost-usd" not in answer.headers


async def test_an_error_tells_who_failed_and_how_often(rogue: RogueWorld) -> None:
    rogue.backend.will(answers(response(b"{}", status=b"503 X"), goes_on=True))
    rogue.backend.act = answers(response(b"not json"))
    answer = await rogue.post(CHAT, request_of(CHAT, OPENAI), rogue.key(), **{"x-stainless-timeout": "600"})
    assert answer.status == 502
    assert (answer.headers["x-fulmen-backend"], answer.headers["x-fulmen-tries"]) == ("openai", "2")
    assert ID.fullmatch(answer.headers["x-fulmen-request-id"])


@pytest.mark.parametrize(
    ("method", "path", "key", "status"),
    [
        ("POST", "/v1/chat/completions", "wrong", 401),
        ("POST", "/v1/messages", "wrong", 401),
        ("POST", "/nothing", "", 404),
        ("GET", "/v1/chat/completions", "", 405),
        ("GET", "/healthz", "", 200),
    ],
)
async def test_every_answer_has_an_id_even_one_to_nobody(
    proxy: RunningProxy, method: str, path: str, key: str, status: int
) -> None:
    seen = set()
    for _ in range(2):
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with proxy.http.request(method, proxy.url.removesuffix("/v1") + path, headers=headers) as answer:
            assert answer.status == status
            seen.add(answer.headers["x-fulmen-request-id"])
            named = "request-id" if path == "/v1/messages" else "x-request-id"
            assert answer.headers[named] == answer.headers["x-fulmen-request-id"]
    assert len(seen) == 2


async def test_the_vendors_clients_read_the_id_which_is_that_of_the_calls_span(world: VendorWorld) -> None:
    attempt, key = world.proxy.attempt()
    async with world.openai_agent(key) as chats, world.anthropic_agent(key) as messages:
        completion = await chats.chat.completions.create(model=ENGINE, messages=HELLO)
        message = await messages.messages.create(model=ENGINE, max_tokens=9, messages=HELLO)
        with pytest.raises(openai.NotFoundError) as absent:
            await chats.chat.completions.create(model="absent", messages=HELLO)
        with pytest.raises(anthropic.NotFoundError) as gone:
            await messages.messages.create(model="absent", max_tokens=9, messages=HELLO)
        own = await chats.chat.completions.create(model=GPT, messages=HELLO)
        vendors = await messages.messages.create(model=ANTHROPIC, max_tokens=9, messages=HELLO)
    await world.proxy.flush(attempt)
    spans = {span.span_id.hex() for span, _ in world.store.spans(attempt)}
    assert {completion._request_id, message._request_id} <= spans
    assert ID.fullmatch(absent.value.request_id or "")
    assert ID.fullmatch(gone.value.request_id or "")
    # The vendor's own id stays, for its support.
    assert [str(each._request_id)[:4] for each in (own, vendors)] == ["req_", "req_"]
