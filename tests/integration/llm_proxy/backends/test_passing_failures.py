"""Which refusals of a backend are asked again or elsewhere, how often, and for how long."""

from __future__ import annotations

import json

import pytest

from fulmen.llm_proxy.v1 import route_pb2, route_service_pb2
from fulmen_llm_proxy.transport.http.http_app import _TIMEOUT_HEADERS
from tests.support.llm_proxy.rogue_backend import CHAT, MESSAGES, Act, answers, response, serve_well
from tests.support.llm_proxy.rogue_world import CLAUDE, OPENAI, RogueWorld, request_of, rogue_fixtures
from tests.support.llm_proxy.vendor_world import CLAUDE as ANTHROPIC
from tests.support.llm_proxy.vendor_world import GPT, VendorWorld
from tests.support.soak import long_but

pytestmark = pytest.mark.asyncio(loop_scope="module")
shared, rogue = rogue_fixtures()

PASSING = [408, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 525, 529, 530, 599]
"""Those of Cloudflare and Anthropic among them."""
HELLO = [{"role": "user", "content": "hello"}]


def refuses(status: int) -> Act:
    body = b'{"type": "error", "error": {"type": "api_error", "message": "Not now."}}'
    return answers(response(body, status=b"%d X" % status), goes_on=True)


CALLS = [(status, *way) for status in PASSING for way in ((CHAT, OPENAI), (MESSAGES, CLAUDE), (CHAT, CLAUDE))]
"""Each status in one way, and in all ways what a vendor says when it is busy."""


@pytest.mark.parametrize(
    ("status", "path", "model"),
    long_but([call for call in CALLS if call[0] == 429 or call[1:] == (CHAT, CLAUDE)], CALLS),
)
async def test_a_call_that_fails_in_passing_is_sent_again(
    rogue: RogueWorld, path: str, model: str, status: int
) -> None:
    before = rogue.backend.will(refuses(status))
    answer = await rogue.post(path, request_of(path, model), rogue.key())
    assert (answer.status, len(rogue.backend.asked) - before) == (200, 2)
    assert answer.headers["x-fulmen-tries"] == "2"


@pytest.mark.parametrize("status", PASSING)
async def test_a_call_that_fails_in_passing_is_answered_by_the_fallback(rogue: RogueWorld, status: int) -> None:
    place = route_pb2.RouteTarget(backend="backends/openai", backend_model="dear", weight=1)
    route = route_pb2.Route(name="routes/dear", targets=[place], fallbacks=[f"routes/{OPENAI}"])
    await rogue.proxy.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))
    before = rogue.backend.will(refuses(status))
    answer = await rogue.post(CHAT, request_of(CHAT, "dear"), rogue.key())
    asked = [json.loads(one.body)["model"] for one in rogue.backend.asked[before:]]
    assert (answer.status, asked) == (200, ["dear", OPENAI])


@pytest.mark.parametrize("status", [400, 404, 422, 501])
async def test_what_would_fail_again_is_asked_once(rogue: RogueWorld, status: int) -> None:
    before = rogue.backend.will(refuses(status), serve_well)
    answer = await rogue.post(CHAT, request_of(CHAT, OPENAI), rogue.key())
    assert (answer.status, len(rogue.backend.asked) - before) == (status, 1)


async def test_a_call_that_breaks_its_server_is_sent_there_twice_at_most(rogue: RogueWorld) -> None:
    before = len(rogue.backend.asked)
    rogue.backend.act = refuses(500)
    answer = await rogue.post(CHAT, request_of(CHAT, OPENAI), rogue.key())
    assert (answer.status, len(rogue.backend.asked) - before) == (500, 2)


@pytest.mark.parametrize("name", [name.decode() for name in _TIMEOUT_HEADERS])
async def test_retries_end_before_the_caller_leaves(rogue: RogueWorld, name: str) -> None:
    for timeout_s, status in (
        ("0.000001", 503),
        ("600.0", 200),
        ("NaN", 200),
        ("inf", 200),
        ("-1", 200),
        ("soon", 200),
    ):
        before = rogue.backend.will(refuses(503))
        answer = await rogue.post(CHAT, request_of(CHAT, OPENAI), rogue.key(), **{name: timeout_s})
        assert answer.status == status, timeout_s
        assert len(rogue.backend.asked) - before == (1 if status == 503 else 2)


@pytest.mark.asyncio(loop_scope="function")
async def test_the_vendors_clients_say_how_long_they_wait(world: VendorWorld) -> None:
    names = {name.decode() for name in _TIMEOUT_HEADERS}
    async with world.openai_agent() as openai, world.anthropic_agent() as anthropic:
        chat = await openai.chat.completions.with_raw_response.create(model=GPT, messages=HELLO)
        message = await anthropic.messages.with_raw_response.create(model=ANTHROPIC, max_tokens=9, messages=HELLO)
    for answer in (chat, message):
        sent = {name.lower(): value for name, value in answer.http_request.headers.items()}
        [*stated] = [float(sent[name]) for name in names & sent.keys()]
        assert stated
        assert min(stated) > 0
