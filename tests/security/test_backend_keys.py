"""A vendor's key goes to the hosts of its entry only, whatever address a backend names (T3)."""

from __future__ import annotations

import pytest
from pydantic import SecretStr, ValidationError

from fulmen.errors import ArgumentInvalid, BackendUnavailable
from fulmen.llm_proxy.v1 import backend_pb2
from fulmen_llm_proxy.backends.access import BackendKeys
from fulmen_llm_proxy.routing.codec import decode_backend
from fulmen_llm_proxy.settings import BackendKey, LlmProxySettings
from fulmen_service_kit.security.tokens import Role
from tests.security.test_hostile_resources import until_loaded
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import running_proxy, target
from tests.support.store.running import SIGNING_KEY, StoreHandle

KEY = "sk-secret"
KEYS = BackendKeys({"openai": BackendKey(key=SecretStr(KEY), hosts=("api.openai.com", "*.example.com:8000"))})
ALLOWED = (
    "https://api.openai.com/v1",
    "http://API.OpenAI.com:8443/v1",
    "https://api.openai.com./v1",
    "https://user:pass@api.openai.com/v1",
    "http://a.example.com:8000/v1",
)
REFUSED = (
    "http://evil.example/v1",
    "https://api.openai.com.evil.example/v1",
    "https://api.openai.com@evil.example/v1",
    "https://evil.example\\@api.openai.com/v1",
    "https://xapi.openai.com/v1",
    "http://a.example.com/v1",
    "http://example.com:8000/v1",
    "http://127.0.0.1:8000/v1",
    "http://[::1]:8000/v1",
    "http://[api.openai.com/v1",
    "http://api.openai.com:99999/v1",
    "http://\N{FULLWIDTH LATIN SMALL LETTER A}pi.openai.com/v1",
)


def headers(url: str, **fields: object) -> dict[str, str]:
    """Returns the headers that a backend at an address gets."""
    message = backend_pb2.Backend(name="backends/one", base_url=url, key_name="openai", **fields)  # type: ignore[arg-type]
    return KEYS.headers(decode_backend(message))


@pytest.mark.parametrize("url", ALLOWED)
def test_a_key_is_sent_to_its_hosts(url: str) -> None:
    assert KEY in str(headers(url))


@pytest.mark.parametrize("dialect", backend_pb2.Dialect.keys())
@pytest.mark.parametrize("url", REFUSED)
def test_a_key_is_sent_nowhere_else(url: str, dialect: str) -> None:
    with pytest.raises((BackendUnavailable, ArgumentInvalid), match=r"may not be sent to|base_url") as refused:
        headers(url, dialect=dialect, api_version="1")
    assert KEY not in str(refused.value)


async def test_a_call_takes_no_key_to_another_host(store: StoreHandle) -> None:
    keys = {"vendor": {"key": KEY, "hosts": ["api.example.com"]}}
    async with Backend() as thief, running_proxy(store.target, signing_key=SIGNING_KEY, backend_keys=keys) as proxy:
        await until_loaded(proxy)
        await proxy.register("one", thief.url, key_name="vendor")
        await proxy.put_route(target("one", policy=""))
        token = proxy.signer.issue(Role.CLIENT, subject="x", ttl_s=60)
        status, answer = await proxy.chat(token)
        assert KEY not in str(answer)
        assert status >= 500
        assert thief.received == []


def test_a_key_without_hosts_is_refused_at_start() -> None:
    for entry in (KEY, {"key": KEY}, {"key": KEY, "hosts": []}):
        with pytest.raises(ValidationError, match="backend_keys") as refused:
            LlmProxySettings(backend_keys={"openai": entry})  # type: ignore[dict-item]
        assert KEY not in str(refused.value)
