"""Guards of the operator judge calls before they are sent, and answers before they are given."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from pydantic import ValidationError

from fulmen.llm_proxy.v1 import completion_service_pb2, completion_service_pb2_grpc
from fulmen.model_call import CLIENT_GONE_ATTRIBUTE
from fulmen_llm_proxy.calls.guarding import _document
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_service_kit.errors import StartupError
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy

MODULE = """
from typing import Any


async def polite(document: dict[str, Any]) -> str | None:
    text = str(document.get("answer") or document["request"])
    return "be polite" if "rude" in text else None


async def wrong(document: dict[str, Any]) -> str | None:
    raise RuntimeError("out of order")


def blocks(document: dict[str, Any]) -> str | None:
    return None
"""


@dataclass
class Webhook:
    """A guard behind a URL: it refuses what has the word `secret`, and notes what it is asked."""

    url: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list)
    answer: Callable[[], web.Response] | None = None
    gate: asyncio.Event | None = None
    in_parts: bool = False

    async def judge(self, request: web.Request) -> web.StreamResponse:
        document = await request.json()
        self.asked.append(document)
        if self.gate is not None:
            await self.gate.wait()
        if self.answer is not None:
            return self.answer()
        said = json.dumps(document["answer"] if document["phase"] == "after" else document["request"])
        verdict = {"allow": False, "message": "no secrets"} if "secret" in said else {"allow": True}
        if not self.in_parts:
            return web.json_response(verdict)
        answer = web.StreamResponse()
        await answer.prepare(request)
        for part in json.dumps(verdict):
            await answer.write(part.encode())
            await asyncio.sleep(0.005)  # so that it is sent alone
        return answer


@pytest.fixture
async def webhook() -> AsyncIterator[Webhook]:
    """Yields a guard."""
    found = Webhook()
    app = web.Application()
    app.router.add_post("/check", found.judge)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}/check"
    yield found
    await runner.cleanup()


Proxy = Callable[..., AbstractAsyncContextManager[RunningProxy]]


@pytest.fixture
def guarded(store: FakeStore, backend: Backend, webhook: Webhook) -> Proxy:
    """Returns what runs a proxy with one guard, the webhook unless another is named."""

    @asynccontextmanager
    async def run(**guard: Any) -> AsyncIterator[RunningProxy]:
        one = {"name": "mine", "url": webhook.url, "deadline_s": 20, **guard}
        async with AsyncExitStack() as stack:
            yield await stack.enter_async_context(
                running_proxy(store.target, backend_url=backend.url, guards=[one], health_interval_s=300)
            )

    return run


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installs a package with guards."""
    (tmp_path / "our_guards.py").write_text(MODULE)
    info = tmp_path / "our_guards-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: our-guards\nVersion: 1\n")
    names = "".join(f"{name} = our_guards:{name}\n" for name in ("polite", "wrong", "blocks"))
    (info / "entry_points.txt").write_text(f"[fulmen.llm_proxy.guards]\n{names}")
    monkeypatch.syspath_prepend(tmp_path)


async def streamed(proxy: RunningProxy, key: str, content: str) -> tuple[int, str]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": True}
    headers = {"Authorization": f"Bearer {key}"}
    async with proxy.http.post(f"{proxy.url}/chat/completions", json=body, headers=headers) as answer:
        return answer.status, await answer.text()


async def test_a_call_that_is_refused_reaches_no_backend(guarded: Proxy, webhook: Webhook, backend: Backend) -> None:
    async with guarded() as proxy:
        attempt, key = proxy.attempt()
        assert (await proxy.chat(key, "hello"))[0] == 200
        status, answer = await proxy.chat(key, "a secret")
        assert (status, answer["error"]["code"]) == (403, "guard_refused")
        assert answer["error"]["message"] == "Refused by the guard 'mine': no secrets"
        assert len(backend.received) == 1
        asked = webhook.asked[0]
        assert {key: asked[key] for key in ("phase", "project", "attempt", "model", "api")} == {
            "phase": "before",
            "project": "projects/default",
            "attempt": attempt,
            "model": MODEL,
            "api": "chat_completions",
        }
        assert asked["request"]["messages"] == [{"role": "user", "content": "hello"}]
        counts = [proxy.metric("guard_checks_total", guard="mine", phase="before", outcome=each) for each in
                  ("allowed", "refused")]  # fmt: skip
        assert counts == [1, 1]


async def test_a_verdict_that_arrives_in_parts_is_read_to_its_end(guarded: Proxy, webhook: Webhook) -> None:
    webhook.in_parts = True
    async with guarded(on_failure="allow") as proxy:
        _, key = proxy.attempt()
        assert (await proxy.chat(key, "a secret"))[0] == 403
        assert (await proxy.chat(key, "hello"))[0] == 200
        assert proxy.metric("guard_checks_total", guard="mine", phase="before", outcome="failed") is None


async def test_an_answer_that_is_no_json_cannot_change_what_a_guard_is_asked() -> None:
    assert _document(b'{"a": 1}') == msgspec.Raw(b'{"a": 1}')
    for body in (b'1, "project": "projects/other"', b'{"a": 1', b"", b"{} {}"):
        assert _document(body) is None


async def test_an_answer_is_judged_before_any_of_it_is_given(
    guarded: Proxy, webhook: Webhook, store: FakeStore
) -> None:
    async with guarded(phases=["after"]) as proxy:
        attempt, key = proxy.attempt()
        assert (await proxy.chat(key, "hello"))[0] == 200
        status, text = await streamed(proxy, key, "hello")
        assert (status, text.count("data: ") > 2, text.endswith("data: [DONE]\n\n")) == (200, True, True)
        for status, said in (await proxy.chat(key, "a secret"), await streamed(proxy, key, "a secret")):
            assert status == 403
            assert "guard_refused" in str(said)
            assert "You said" not in str(said)
        answers = [each["answer"]["choices"][0]["message"]["content"] for each in webhook.asked]
        assert answers == ["You said: hello", "You said: hello", "You said: a secret", "You said: a secret"]
        assert (await proxy.flush(attempt)).call_count == 4
        # As if the agent had left: what it has not seen is not trained on.
        unseen = [any(a.key == CLIENT_GONE_ATTRIBUTE for a in span.attributes) for span, _ in store.spans(attempt)]
        assert unseen == [False, False, True, True]


@pytest.mark.parametrize("failure", ["late", "status", "not a verdict", "away"])
@pytest.mark.parametrize(("on_failure", "status"), [("refuse", 503), ("allow", 200)])
async def test_a_guard_that_cannot_judge_refuses_or_allows_as_it_is_set(
    guarded: Proxy, webhook: Webhook, failure: str, on_failure: str, status: int
) -> None:
    more: dict[str, Any] = {}
    if failure == "late":
        webhook.gate, more["deadline_s"] = asyncio.Event(), 0.05
    elif failure == "away":
        more["url"] = "http://127.0.0.1:9/check"
    else:
        webhook.answer = lambda: web.Response(status=500 if failure == "status" else 200, text='{"allowed": true}')
    async with guarded(on_failure=on_failure, **more) as proxy:
        got, answer = await proxy.chat(proxy.attempt()[1], "hello")
        assert got == status
        assert status == 200 or answer["error"]["code"] == "guard_unavailable"
        assert proxy.metric("guard_checks_total", guard="mine", phase="before", outcome="failed") == 1
    if webhook.gate is not None:
        webhook.gate.set()


@pytest.mark.usefixtures("installed")
async def test_a_function_of_an_installed_package_is_a_guard(guarded: Proxy, backend: Backend) -> None:
    async with guarded(url="", entry_point="polite", phases=["before", "after"]) as proxy:
        key = proxy.attempt()[1]
        assert (await proxy.chat(key, "hello"))[0] == 200
        status, answer = await proxy.chat(key, "rude words")
        assert (status, answer["error"]["message"]) == (403, "Refused by the guard 'mine': be polite")
        assert len(backend.received) == 1
    async with guarded(url="", entry_point="wrong") as proxy:
        status, answer = await proxy.chat(proxy.attempt()[1], "hello")
        assert (status, answer["error"]["code"]) == (503, "guard_unavailable")
        assert "out of order" not in answer["error"]["message"]


async def test_calls_over_grpc_are_judged_too(guarded: Proxy) -> None:
    async with guarded() as proxy:
        stub = completion_service_pb2_grpc.CompletionServiceStub(proxy.channel)
        body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "a secret"}]}).encode()
        request = completion_service_pb2.CompleteRequest(path="/v1/chat/completions", body_json=body)
        answer = await stub.Complete(request)
        assert answer.http_status == 403
        assert json.loads(answer.body_json)["error"]["code"] == "guard_refused"


@pytest.mark.usefixtures("installed")
async def test_guards_that_cannot_be_loaded_stop_the_start_and_are_all_named(store: FakeStore) -> None:
    guards = [{"name": "one", "entry_point": "none"}, {"name": "two", "entry_point": "blocks"}]
    with pytest.raises(
        StartupError, match=r"guard one: no installed package .*; guard two: .* is not an async function"
    ):
        async with running_proxy(store.target, guards=guards):
            pass


@pytest.mark.parametrize(
    ("guards", "problem"),
    [
        ([{"name": "a"}], "needs either a url or an entry_point"),
        ([{"name": "a", "url": "http://h/", "entry_point": "b"}], "needs either"),
        ([{"name": "a", "url": "ftp://h/"}], "pattern"),
        ([{"name": "a", "url": "http://h/", "phases": ["during"]}], "before"),
        ([{"name": "a", "url": "http://h/"}] * 2, "a is named twice"),
    ],
)
def test_malformed_guards_are_refused(guards: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        LlmProxySettings(dev_mode=True, guards=guards)  # type: ignore[arg-type]
