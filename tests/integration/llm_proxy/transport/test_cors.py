"""Web pages that call the model APIs: none, unless the operator names their origin."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from fulmen_llm_proxy.settings import LlmProxySettings
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy

PAGE, OTHER = "https://app.example.com", "https://evil.example.com"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


async def answered(proxy: RunningProxy, method: str, origin: str, **headers: str) -> tuple[int, dict[str, str]]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]} if method == "POST" else None
    sent = {"Origin": origin, "Authorization": f"Bearer {proxy.attempt()[1]}", **headers}
    async with proxy.http.request(method, f"{proxy.url}/chat/completions", json=body, headers=sent) as answer:
        await answer.read()
        return answer.status, {name.lower(): value for name, value in answer.headers.items()}


async def test_no_page_may_call_by_default(proxy: RunningProxy) -> None:
    status, headers = await answered(proxy, "OPTIONS", PAGE, **PREFLIGHT)
    assert status == 405
    assert not [name for name in headers if name.startswith("access-control-")]
    _, headers = await answered(proxy, "POST", PAGE)
    assert not [name for name in headers if name.startswith("access-control-")]


@pytest.mark.parametrize("origins", [f"{PAGE}, http://localhost:3000", "*"])
async def test_pages_of_named_origins_may_call_and_read_the_answer(
    store: FakeStore, backend: Backend, origins: str
) -> None:
    async with running_proxy(store.target, backend_url=backend.url, cors_origins=origins) as proxy:
        status, asked = await answered(proxy, "OPTIONS", PAGE, **PREFLIGHT)
        assert status == 200
        assert asked["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in asked["access-control-allow-methods"]
        called, read = await answered(proxy, "POST", PAGE)
        assert called == 200
        for headers in (asked, read):
            assert headers["access-control-allow-origin"] == ("*" if origins == "*" else PAGE)
            assert "access-control-allow-credentials" not in headers
        assert read["access-control-expose-headers"] == "*"
        refused, told = await answered(proxy, "POST", PAGE, Authorization="Bearer wrong")
        assert (refused, "access-control-allow-origin" in told) == (401, True)
        status, other = await answered(proxy, "OPTIONS", OTHER, **PREFLIGHT)
        assert (status, "access-control-allow-origin" in other) == ((200, True) if origins == "*" else (405, False))


def test_origins_that_are_none_are_named_at_once() -> None:
    with pytest.raises(ValidationError, match=r"example\.com, https://a\.example/path:"):
        LlmProxySettings(dev_mode=True, cors_origins="example.com, https://a.example/path, https://b.example")
