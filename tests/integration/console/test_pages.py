"""The pages and files that browsers load from the console."""

from __future__ import annotations

import re

from fulmen_service_kit.security.tokens import Role
from tests.support.console import Browser, console_of
from tests.support.store.running import StoreHandle

HTML = {"accept": "text/html,*/*"}


async def test_any_address_of_a_page_brings_the_same_page_under_a_strict_policy(browser: Browser) -> None:
    home = await browser.send("GET", "/", **HTML)
    deep = await browser.send("GET", "/projects/default/rollouts/0193", **HTML)
    assert home.status == deep.status == 200
    assert home.body == deep.body
    policy = home.headers["content-security-policy"]
    for rule in (
        "default-src 'none'",
        "script-src 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    ):
        assert rule in policy
    assert "unsafe" not in policy
    assert home.headers["cache-control"] == "no-store"
    # What the policy would refuse is not in the page.
    assert b"<script>" not in home.body
    assert b"style=" not in home.body


async def test_files_of_the_page_are_kept_by_browsers_and_sent_compressed(browser: Browser) -> None:
    home = await browser.send("GET", "/", **HTML)
    (script,) = re.findall(rb'src="\./(assets/[^"]+\.js)"', home.body)
    answer = await browser.send("GET", f"/{script.decode()}")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/javascript; charset=utf-8"
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["content-encoding"] == "gzip"
    assert (await browser.send("GET", "/assets/nothing.js", **HTML)).status == 404


async def test_what_no_browser_shows_is_not_answered_with_a_page(browser: Browser) -> None:
    assert (await browser.send("GET", "/projects/default", accept="application/json")).status == 404
    assert (await browser.send("POST", "/projects/default", {}, **HTML)).status == 404
    head = await browser.send("HEAD", "/projects/default", **HTML)
    assert (head.status, head.body) == (200, b"")


async def test_behind_a_path_prefix_the_page_has_it_as_its_base(store: StoreHandle) -> None:
    async with console_of(store, path_prefix="/ops/fulmen") as prefixed:
        page = await prefixed.send("GET", "/projects/default", **HTML)
        assert b'<base href="/ops/fulmen/" />' in page.body
        prefixed.url = prefixed.url.removesuffix("/ops/fulmen")
        assert (await prefixed.send("GET", "/projects/default", **HTML)).status == 404


async def test_services_say_whether_they_are_ready_to_people_who_signed_in(store: StoreHandle) -> None:
    async with console_of(store, llm_proxy_target="127.0.0.1:1") as browser:
        assert (await browser.send("GET", "/services")).status == 401
        token = f"Bearer {store.token(Role.READER)}"
        answer = await browser.send("GET", "/services", authorization=token)
        assert answer.body == {
            "services": [
                {"name": "store", "status": "SERVING"},
                {"name": "llm_proxy", "status": "UNREACHABLE"},
            ]
        }
        await browser.sign_in(store.token(Role.READER))
        assert (await browser.send("GET", "/services")).body == answer.body
