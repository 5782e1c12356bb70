"""`fulmen proxy apply` against a real store and proxy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from click.testing import Result
from structlog.testing import capture_logs

from fulmen_cli.exits import INTERRUPTED, Exit
from fulmen_cli.main import app
from fulmen_service_kit.security.tokens import Role
from tests.support.cli.command_runner import CliRunner
from tests.support.cli.screens import check_screen
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.store.running import SIGNING_KEY, StoreHandle

LIMIT_S = 60
NOBODY = "127.0.0.1:1"
SET = """
[[backend]]
name = "local"
base_url = "http://127.0.0.1:9/v1"

[[route]]
model = "chat"
targets = [{ backend = "local", model = "small" }]
"""


class Fulmen:
    """The command line, connected to a proxy as an administrator."""

    def __init__(self, proxy: RunningProxy) -> None:
        self.environment = {
            "FULMEN_LLM_PROXY_TARGET": f"127.0.0.1:{proxy.parts.server.port}",
            "FULMEN_TOKEN": proxy.signer.issue(Role.ADMIN, subject="tests", ttl_s=600),
            "COLUMNS": "300",
        }

    async def __call__(self, *arguments: str | Path, status: int = 0, **environment: str) -> Result:
        words = ["proxy", *map(str, arguments)]
        result = await asyncio.to_thread(CliRunner().invoke, app, words, env=self.environment | environment)
        assert result.exit_code == status, result.output
        return result


@pytest.fixture
async def fulmen(store: StoreHandle) -> AsyncIterator[Fulmen]:
    """Yields the command line before a proxy without routes."""
    with capture_logs():
        async with running_proxy(store.target, signing_key=SIGNING_KEY) as proxy:
            async with asyncio.timeout(LIMIT_S):
                await proxy.loaded()
            yield Fulmen(proxy)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Returns a file with a backend and a route."""
    path = tmp_path / "proxy.toml"
    path.write_text(SET)
    return path


async def test_a_file_is_checked_applied_protected_and_deleted(fulmen: Fulmen, file: Path) -> None:
    checked = await fulmen("apply", file, "--check", FULMEN_LLM_PROXY_TARGET=NOBODY, FULMEN_TOKEN="")
    screen = f"$ fulmen proxy apply proxy.toml --check\n{checked.stdout}"
    for arguments in (["apply", file], ["apply", file], ["routes"], ["route", "show", "chat"], ["backends"]):
        said = await fulmen(*arguments)
        words = [each.name if isinstance(each, Path) else each for each in arguments]
        screen += f"$ fulmen proxy {' '.join(words)}\n{said.stdout}"
    refused = await fulmen("route", "delete", "chat", status=Exit.CONFLICT)
    screen += f"$ fulmen proxy route delete chat\n{refused.stderr}"
    file.unlink()
    screen += f"$ fulmen proxy apply proxy.toml --delete\n{(await fulmen('apply', file, '--delete')).stdout}"
    check_screen("proxy-apply", screen)
    assert json.loads((await fulmen("routes", "-o", "json")).stdout) == []


async def test_problems_are_told_at_once_and_the_set_before_stays(fulmen: Fulmen, file: Path) -> None:
    await fulmen("apply", file)
    file.write_text(SET.replace("name =", "nam =").replace("model =", "models ="))
    for more in ([], ["--check"]):
        bad = await fulmen("apply", file, *more, status=Exit.USAGE)
        assert all(text in bad.stderr for text in ("backend 1.nam: no such key", "route 1.models: no such key"))
    (route,) = json.loads((await fulmen("routes", "-o", "json")).stdout)
    assert (route["name"], route["file"]) == ("routes/chat", "proxy.toml")
    await fulmen("apply", file, "--check", "--delete", status=Exit.USAGE)
    await fulmen("apply", file.parent / "none.toml", status=Exit.USAGE)


async def test_a_watched_file_is_applied_whenever_it_is_valid(fulmen: Fulmen, file: Path) -> None:
    process = await watching(fulmen, file)
    assert process.stdout is not None
    assert process.stderr is not None
    async with asyncio.timeout(LIMIT_S):
        assert json.loads(await process.stdout.readline()) == {"added": ["backends/local", "routes/chat"]}
        file.write_text(SET.replace('"chat"', '"talk"') + "\n[[rout")
        assert b"is not valid TOML" in await process.stderr.readline()
        assert [each["name"] for each in json.loads((await fulmen("routes", "-o", "json")).stdout)] == ["routes/chat"]
        file.unlink()
        file.write_text(SET.replace('"chat"', '"talk"'))
        answer = json.loads(await process.stdout.readline())
        assert answer == {"added": ["routes/talk"], "deleted": ["routes/chat"]}
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == INTERRUPTED


async def test_a_watched_file_waits_for_a_proxy_that_is_away(store: StoreHandle, file: Path) -> None:
    with capture_logs():
        async with AsyncExitStack() as proxies:
            settings = {"signing_key": SIGNING_KEY}
            first = await proxies.enter_async_context(running_proxy(store.target, **settings))
            async with asyncio.timeout(LIMIT_S):
                await first.loaded()
            fulmen = Fulmen(first)
            process = await watching(fulmen, file)
            assert process.stdout is not None
            assert process.stderr is not None
            async with asyncio.timeout(LIMIT_S):
                await process.stdout.readline()
            await proxies.aclose()
            file.write_text(SET.replace('"chat"', '"talk"'))
            async with asyncio.timeout(LIMIT_S):
                assert b"Trying again." in await process.stderr.readline()
            port = first.parts.server.port
            async with running_proxy(store.target, **settings, port=port), asyncio.timeout(LIMIT_S):
                answer = json.loads(await process.stdout.readline())
                assert answer == {"added": ["routes/talk"], "deleted": ["routes/chat"]}
                process.send_signal(signal.SIGTERM)
                assert await process.wait() == INTERRUPTED


async def watching(fulmen: Fulmen, file: Path) -> asyncio.subprocess.Process:
    """Starts the command that watches a file."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fulmen_cli", "proxy", "apply", str(file), "--watch", "-o", "json"),
        env={**os.environ, **fulmen.environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
