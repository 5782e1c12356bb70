"""A vendor's key goes to the hosts of its entry only, whatever address a backend names."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import SecretStr, ValidationError

from fulmen.errors import ArgumentInvalid, BackendUnavailable
from fulmen.ids import DEFAULT_PROJECT
from fulmen.llm_proxy.v1 import backend_pb2
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import secret_service_pb2 as pb
from fulmen_llm_proxy.backends.access import BackendKeys
from fulmen_llm_proxy.backends.key_watch import BackendKeyWatch
from fulmen_llm_proxy.routing.codec import decode_backend
from fulmen_llm_proxy.settings import BackendKey, LlmProxySettings
from fulmen_service_kit.security.keys import attempt_secrets
from fulmen_service_kit.security.sealing import BACKEND_KEYS_LABEL, Sealer
from fulmen_service_kit.security.secret import split_keys
from fulmen_service_kit.security.tokens import Role
from tests.security.test_hostile_resources import until_loaded
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.harness import RunningProxy, running_proxy, target
from tests.support.store.running import SIGNING_KEY, StoreHandle, running_store

KEY = "sk-secret"
LINES = split_keys(attempt_secrets(SIGNING_KEY))
KEYS = BackendKeys({"openai": BackendKey(key=SecretStr(KEY), hosts=("api.openai.com", "*.example.com:8000"))})
ALLOWED = (
    "https://api.openai.com/v1",
    "http://API.OpenAI.com:8443/v1",
    "https://api.openai.com./v1",
    "http://a.example.com:8000/v1",
)
REFUSED = (
    "http://evil.example/v1",
    "https://api.openai.com.evil.example/v1",
    "https://api.openai.com@evil.example/v1",
    "https://evil.example\\@api.openai.com/v1",
    "https://user:pass@api.openai.com/v1",
    "http://xn--k-4wn.example.com:8000.evil/v1",
    "http://xn--k-4wn/v1",
    "http://[::ffff:127.0.0.1]/v1",
    "http://api.openai.com%00.evil.example/v1",
    "http://api.openai.com%2eevil.example/v1",
    "http://[fe80::1%25api.openai.com]/v1",
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
    with pytest.raises((BackendUnavailable, ArgumentInvalid), match=r"may not be sent;|base_url") as refused:
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


async def with_key(store: StoreHandle, key: str, host: str = "127.0.0.1") -> None:
    """Sets the key `vendor` in the store."""
    stubs = await store.stubs(role=Role.SERVICE, project=DEFAULT_PROJECT)
    await stubs.secrets.SetSecret(pb.SetSecretRequest(name="vendor", value=key.encode(), hosts=[host]))


async def until_sent(proxy: RunningProxy, vendor: Backend, key: str) -> None:
    """Calls until the vendor gets a key."""
    async with asyncio.timeout(20):
        while True:
            status, answer = await proxy.chat(proxy.signer.issue(Role.CLIENT, subject="x", ttl_s=60))
            assert KEY not in str(answer)
            if status == 200 and vendor.received[-1].headers.get("Authorization") == f"Bearer {key}":
                return
            await asyncio.sleep(0.05)


async def test_a_key_in_the_store_reaches_the_vendor_and_a_changed_one_without_a_restart(database_url: str) -> None:
    async with AsyncExitStack() as stack:
        vendor = await stack.enter_async_context(Backend())
        store = await stack.enter_async_context(running_store(database_url))
        proxy = await stack.enter_async_context(
            running_proxy(store.target, signing_key=SIGNING_KEY, retry_deadline_s=0)
        )
        await until_loaded(proxy)
        await proxy.register("one", vendor.url, key_name="vendor")
        await proxy.put_route(target("one", policy=""))
        status, answer = await proxy.chat(proxy.signer.issue(Role.CLIENT, subject="x", ttl_s=60))
        assert (status, vendor.received) == (502, [])
        assert "fulmen secret set vendor" in str(answer)
        await with_key(store, "sk-the-first-key")
        await until_sent(proxy, vendor, "sk-the-first-key")
        await with_key(store, "sk-the-second-key")
        await until_sent(proxy, vendor, "sk-the-second-key")
        await with_key(store, "sk-the-third-key", host="api.example.com")
        async with asyncio.timeout(20):
            while status == 200 or "may not be sent;" not in str(answer):
                status, answer = await proxy.chat(proxy.signer.issue(Role.CLIENT, subject="x", ttl_s=60))
                await asyncio.sleep(0.05)
        assert {each.headers.get("Authorization", "") for each in vendor.received} == {
            "Bearer sk-the-first-key", "Bearer sk-the-second-key",
        }  # fmt: skip


async def test_a_known_key_stays_in_force_while_the_store_is_away(database_url: str) -> None:
    keys = BackendKeys({})
    sealer = Sealer(lambda: LINES, BACKEND_KEYS_LABEL)
    backend = decode_backend(
        backend_pb2.Backend(name="backends/one", base_url="http://127.0.0.1:1/v1", key_name="vendor")
    )
    async with running_store(database_url) as store:
        await with_key(store, "sk-the-only-key")
        token = store.token(Role.SERVICE)
        channel = open_channel(store.target, token=token)
        watch = BackendKeyWatch(channel=channel, project=DEFAULT_PROJECT, keys=keys, sealer=sealer, configured=dict)
        await watch.follow_once()
        assert watch.is_loaded
        assert keys.headers(backend) == {"Authorization": "Bearer sk-the-only-key"}
    await watch.follow_once()
    assert keys.headers(backend) == {"Authorization": "Bearer sk-the-only-key"}
    await channel.close()


def test_the_key_of_a_settings_file_follows_the_file_and_an_invalid_one_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fulmen.watched_file.LOOK_S", 0.0)
    file = tmp_path / "keys.json"
    file.write_text('{"openai": {"key": "sk-first", "hosts": ["api.openai.com"]}}')
    monkeypatch.setenv("FULMEN_LLM_PROXY_BACKEND_KEYS_FILE", str(file))
    monkeypatch.setenv("FULMEN_LLM_PROXY_DEV_MODE", "true")
    settings = LlmProxySettings.from_environment()
    assert settings.current_backend_keys()["openai"].key.get_secret_value() == "sk-first"
    file.write_text('{"openai": {"key": "sk-second", "hosts": ["api.openai.com"]}}')
    assert settings.current_backend_keys()["openai"].key.get_secret_value() == "sk-second"
    file.write_text('{"openai": "sk-third"}')
    with pytest.raises(ValueError, match=r"hosts|object") as refused:
        settings.current_backend_keys()
    assert "sk-third" not in str(refused.value)


def test_a_vendors_usual_variable_is_taken_only_where_the_operator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    assert LlmProxySettings(dev_mode=True).vendors_backend_keys() == {}
    settings = LlmProxySettings(dev_mode=True, vendors="openai")
    taken = settings.vendors_backend_keys()
    assert {name: each.hosts for name, each in taken.items()} == {"openai": ("api.openai.com",)}
    assert KEY not in repr((settings, taken, settings.describe()))
    for wrong, problem in (("anthropic", "ANTHROPIC_API_KEY is not set"), ("nobody", "'nobody' is not known")):
        with pytest.raises(ValidationError, match=problem):
            LlmProxySettings(dev_mode=True, vendors=wrong)


def test_a_setting_wins_over_the_store_and_the_store_over_a_vendors_variable() -> None:
    def entry(key: str) -> dict[str, BackendKey]:
        return {"openai": BackendKey(key=SecretStr(key), hosts=("api.openai.com",))}

    backend = decode_backend(
        backend_pb2.Backend(name="backends/one", base_url="https://api.openai.com/v1", key_name="openai")
    )
    keys = BackendKeys({}, defaults=entry("of the variable"))
    seen = [keys.headers(backend)["Authorization"]]
    keys.replace_stored(entry("of the store"))
    seen.append(keys.headers(backend)["Authorization"])
    keys.replace_configured(entry("of the setting"))
    seen.append(keys.headers(backend)["Authorization"])
    assert seen == ["Bearer of the variable", "Bearer of the store", "Bearer of the setting"]


async def test_neither_a_redirect_nor_the_environment_takes_a_key_elsewhere(
    store: StoreHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        thief = await stack.enter_async_context(Backend())

        async def redirect(request: web.Request) -> web.Response:
            sent.append(request.headers.get("Authorization", ""))
            return web.Response(status=statuses[len(sent) - 1], headers={"Location": f"{thief.url}/chat/completions"})

        app, sent, statuses = web.Application(), list[str](), [301, 302, 303, 307, 308]
        app.router.add_route("*", "/{path:.*}", redirect)
        vendor = await stack.enter_async_context(TestServer(app))
        monkeypatch.setenv("no_grpc_proxy", "127.0.0.1")  # gRPC, other than the vendors' client, reads those below
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, thief.url.removesuffix("/v1"))
        keys = {"vendor": {"key": KEY, "hosts": ["127.0.0.1"]}}
        settings = {"signing_key": SIGNING_KEY, "backend_keys": keys, "retry_deadline_s": 0}
        proxy = await stack.enter_async_context(running_proxy(store.target, **settings))
        await until_loaded(proxy)
        await proxy.register("one", f"http://127.0.0.1:{vendor.port}/v1", key_name="vendor")
        await proxy.put_route(target("one", policy=""))
        for _ in statuses:
            token = proxy.signer.issue(Role.CLIENT, subject="x", ttl_s=600)
            assert (await proxy.chat(token))[0] == 502
        assert (sent, thief.received) == ([f"Bearer {KEY}"] * len(statuses), [])
