"""The chat client of algorithms: keys, rate limits, refusals and outages of an endpoint."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import pytest_asyncio
from aiohttp import web

from fulmen.rpc.channel import open_channel
from fulmen_algorithm.clients.chat import ChatClient
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChatRequest

GOOD = {
    "choices": [{"message": {"role": "assistant", "content": "fine"}}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2},
}


@dataclass
class Endpoint:
    """Answers with the given statuses, in order, then with 200."""

    statuses: list[int] = field(default_factory=list)
    requests: list[tuple[str, dict]] = field(default_factory=list)
    url: str = ""
    answer: dict = field(default_factory=lambda: GOOD)

    async def serve(self, request: web.Request) -> web.Response:
        self.requests.append((request.headers.get("Authorization", ""), await request.json()))
        status = self.statuses.pop(0) if self.statuses else 200
        if status == 307:
            raise web.HTTPTemporaryRedirect(request.path)
        return web.json_response(self.answer if status == 200 else {"error": {"message": "not now"}}, status=status)


@pytest_asyncio.fixture
async def endpoint() -> AsyncIterator[Endpoint]:
    made, application = Endpoint(), web.Application()
    application.router.add_post("/api/v1/chat/completions", made.serve)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}/api/v1"
    yield made
    await runner.cleanup()


async def ask(endpoint: Endpoint, *, base_url: str = "", outage_limit_s: float = 30.0, notices: list | None = None):
    request = ChatRequest(model="m", messages=[{"role": "user", "content": "well?"}], base_url=base_url or endpoint.url)
    async with open_channel("127.0.0.1:1", token=None) as proxy:
        client = ChatClient(
            proxy,
            project="projects/default",
            endpoints={endpoint.url: "s3cret"},
            outage_limit_s=outage_limit_s,
            notify=lambda severity, text: (notices if notices is not None else []).append(text),
        )
        return await client.ask(request)


async def test_an_answer_comes_with_what_it_cost(endpoint):
    answer = await ask(endpoint)
    assert (answer.text, answer.tokens) == ("fine", 9)
    [(authorization, body)] = endpoint.requests
    assert authorization == "Bearer s3cret"
    assert body == {"model": "m", "messages": [{"role": "user", "content": "well?"}], "max_tokens": 1024}


async def test_half_of_a_surrogate_pair_at_the_end_of_an_answer_becomes_a_sign_that_can_be_sent(endpoint):
    endpoint.answer = {"choices": [{"message": {"content": "cut \ud83d"}}]}
    assert (await ask(endpoint)).text == "cut ?"


@pytest.mark.parametrize(
    "changed",
    [
        {"usage": {"prompt_tokens": float("inf")}},
        {"usage": {"completion_tokens": float("nan")}},
        {"usage": [1]},
        {"choices": []},
        {"choices": [{"message": None}]},
        {"choices": {"0": 1}},
    ],
)
async def test_an_answer_of_another_form_fails_the_run_with_a_reason(endpoint, changed):
    endpoint.answer = {**GOOD, **changed}
    with pytest.raises(RunFailed, match="not a chat completion"):
        await ask(endpoint)


async def test_a_rate_limit_is_waited_out_and_reported(endpoint):
    endpoint.statuses = [429]
    notices: list[str] = []
    assert (await ask(endpoint, notices=notices)).text == "fine"
    assert len(endpoint.requests) == 2
    assert len(notices) == 1
    assert "status 429, not now" in notices[0]


async def test_a_refusal_fails_the_run_at_once(endpoint):
    endpoint.statuses = [400, 400]
    with pytest.raises(RunFailed, match=r"refused by m at .*: status 400, not now"):
        await ask(endpoint)
    assert len(endpoint.requests) == 1


async def test_an_endpoint_that_stays_away_fails_the_run(endpoint):
    endpoint.statuses = [503] * 3
    with pytest.raises(RunFailed, match="No answer from m"):
        await ask(endpoint, outage_limit_s=0.1)


async def test_an_address_that_the_service_does_not_name_is_not_called(endpoint):
    with pytest.raises(RunFailed, match="/else is not in the service's setting chat_endpoints"):
        await ask(endpoint, base_url=f"{endpoint.url}/else")
    assert not endpoint.requests


async def test_a_redirection_does_not_carry_the_key_elsewhere(endpoint):
    endpoint.statuses = [307]
    with pytest.raises(RunFailed, match=r"refused by m at .*: status 307"):
        await ask(endpoint)
    assert len(endpoint.requests) == 1
