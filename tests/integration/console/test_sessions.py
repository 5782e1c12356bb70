"""Sessions: a browser signs in with a token or a code, and acts with the rights of that token alone."""

from __future__ import annotations

from http.cookies import SimpleCookie

import pytest

from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.console import ROLLOUTS, Browser, console_of
from tests.support.store.running import SIGNING_KEY, StoreHandle

PROJECT = "projects/default"
LIST = f"{ROLLOUTS}/ListRollouts"


async def test_a_browser_signs_in_acts_and_signs_out(browser: Browser, store: StoreHandle) -> None:
    assert (await browser.call(LIST)).status == 401
    signed_in = await browser.sign_in(store.token(Role.READER))
    assert (signed_in.status, signed_in.body["role"], signed_in.body["project"]) == (200, "reader", PROJECT)
    assert (await browser.call(LIST)).status == 200
    refused = await browser.call(f"{ROLLOUTS}/PauseQueue", {"project": PROJECT})
    assert (refused.status, refused.body["code"]) == (403, "permission_denied")
    assert (await browser.send("GET", "/session")).body["role"] == "reader"
    assert (await browser.send("DELETE", "/session")).status == 200
    assert (await browser.call(LIST)).status == 401


async def test_the_cookie_is_closed_to_scripts_and_other_sites_and_hides_the_token(
    browser: Browser, store: StoreHandle
) -> None:
    token = store.token(Role.READER)
    cookie = SimpleCookie((await browser.sign_in(token)).headers["set-cookie"])["fulmen_session"]
    assert cookie["httponly"]
    assert cookie["samesite"] == "Strict"
    assert cookie["path"] == "/"
    assert not cookie["secure"]
    assert token.split(".")[1] not in cookie.value
    async with console_of(store, is_public_https=True, path_prefix="/fulmen") as behind:
        cookie = SimpleCookie((await behind.sign_in(token)).headers["set-cookie"])["fulmen_session"]
        assert cookie["secure"]
        assert cookie["path"] == "/fulmen/"


async def test_a_code_signs_in_once(browser: Browser, store: StoreHandle) -> None:
    issued = await browser.send("POST", "/session/codes", token=store.token(Role.READER))
    code = issued.body["code"]
    assert (await browser.send("POST", "/session", {"code": code})).body["role"] == "reader"
    again = await browser.send("POST", "/session", {"code": code})
    assert (again.status, again.body["code"]) == (401, "unauthenticated")


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b"token=x", {"content_type": "application/x-www-form-urlencoded"}),
        ({"token": "x", "code": "y"}, {}),
        ({}, {}),
        ({"token": 7}, {}),
        ({"token": "x" * 5000}, {}),
        ([], {}),
        (b"{", {}),
        (b"[" * 10_000, {}),
        ({"token": "x", "more": 1}, {}),
    ],
)
async def test_a_malformed_sign_in_is_refused(browser: Browser, body: object, headers: dict[str, str]) -> None:
    answer = await browser.send("POST", "/session", body, **headers)
    assert (answer.status, answer.body["code"]) == (400, "invalid_argument")


async def test_pages_of_other_sites_cannot_use_a_session(browser: Browser, store: StoreHandle) -> None:
    await browser.sign_in(store.token(Role.CLIENT))
    own = browser.url
    assert (await browser.call(LIST, origin=own)).status == 200
    for headers in (
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ):
        for answer in (
            await browser.call(LIST, **headers),
            await browser.send("POST", "/session", {"token": store.token(Role.ADMIN)}, **headers),
            await browser.send("DELETE", "/session", **headers),
        ):
            assert (answer.status, answer.body["code"]) == (403, "permission_denied"), headers
    # A token in a header is not sent by a browser on its own.
    assert (await browser.call(LIST, token=store.token(Role.READER), origin="https://evil.example")).status == 200


async def test_a_changed_or_foreign_cookie_is_no_session(browser: Browser, store: StoreHandle) -> None:
    await browser.sign_in(store.token(Role.CLIENT))
    (cookie,) = [each for each in browser.session.cookie_jar if each.key == "fulmen_session"]
    value = cookie.value
    browser.session.cookie_jar.clear()
    for wrong in (
        "",
        "x",
        value[:-2],
        value[:10] + ("A" if value[10] != "A" else "B") + value[11:],
        "=" * 40,
        value * 3,
    ):
        answer = await browser.call(LIST, cookie=f"fulmen_session={wrong}")
        assert (answer.status, answer.body["code"]) == (401, "unauthenticated"), wrong
    assert (await browser.call(LIST, cookie=f"fulmen_session={value}")).status == 200
    async with console_of(store) as other:
        assert (await other.call(LIST, cookie=f"fulmen_session={value}")).status == 401


async def test_replicas_with_one_key_share_sessions(store: StoreHandle) -> None:
    key = "k" * 40
    async with console_of(store, session_key=key) as first, console_of(store, session_key=key) as second:
        cookie = SimpleCookie((await first.sign_in(store.token(Role.READER))).headers["set-cookie"])["fulmen_session"]
        assert (await second.call(LIST, cookie=f"fulmen_session={cookie.value}")).status == 200


async def test_a_session_ends_with_its_time_and_with_its_token(store: StoreHandle) -> None:
    async with console_of(store, session_idle_s=0.001) as browser:
        await browser.sign_in(store.token(Role.READER))
        assert (await browser.call(LIST)).status == 401
    async with console_of(store) as browser:
        token = TokenSigner(SIGNING_KEY).issue(Role.READER, subject="tests", ttl_s=-1000, project=PROJECT)
        assert (await browser.sign_in(token)).status == 401


async def test_forged_tokens_are_refused_by_the_console_and_limited_by_address(store: StoreHandle) -> None:
    forged = TokenSigner("f" * 40).issue(Role.ADMIN, subject="tests", ttl_s=600, project=PROJECT)
    async with console_of(store, auth_failures_per_minute=3) as browser:
        statuses = [(await browser.call(LIST, token=forged)).status for _ in range(5)]
        assert statuses[0] == 401
        assert statuses[-1] == 429
        # Others of the same store are not limited.
        async with console_of(store) as other:
            assert (await other.call(LIST, token=store.token(Role.READER))).status == 200


async def test_two_authorization_headers_are_refused(browser: Browser, store: StoreHandle) -> None:
    token = store.token(Role.READER)
    headers = [("authorization", f"Bearer {token}")] * 2 + [("content-type", "application/json")]
    async with browser.session.post(f"{browser.url}/{LIST}", data=b"{}", headers=headers) as answer:
        assert answer.status == 401


async def test_other_methods_and_addresses_are_refused(browser: Browser) -> None:
    assert (await browser.send("PUT", "/session", {})).status == 405
    assert (await browser.send("GET", "/session/codes")).status == 405
    assert (await browser.send("GET", f"/{LIST}")).status == 405
    assert (await browser.send("GET", "/nothing")).status == 404
    assert (await browser.send("GET", "/healthz")).status == 200


async def test_no_answer_is_kept_by_caches_or_taken_for_a_page(browser: Browser, store: StoreHandle) -> None:
    answers = (
        await browser.call(LIST, token=store.token(Role.READER)),
        await browser.call(LIST),
        await browser.sign_in(store.token(Role.READER)),
        await browser.send("GET", "/openapi.json"),
        await browser.send("GET", "/nothing"),
    )
    for answer in answers:
        assert (answer.headers["cache-control"], answer.headers["x-content-type-options"]) == ("no-store", "nosniff")
