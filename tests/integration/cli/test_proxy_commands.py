"""`fulmen proxy ...` against real proxies."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import Result
from structlog.testing import capture_logs

from fulmen_cli.exits import INTERRUPTED, Exit
from fulmen_cli.main import app
from fulmen_service_kit.security.tokens import Role
from tests.support.cli.command_runner import CliRunner
from tests.support.cli.screens import check_screen
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.fake_store import FakeStore
from tests.support.llm_proxy.harness import MODEL, POLICY, RunningProxy, running_proxy, target

LIMIT_S = 60
NOBODY = "127.0.0.1:1"


class Fulmen:
    """The command line, connected to proxies as an administrator."""

    def __init__(self, *proxies: RunningProxy) -> None:
        self.environment = {
            "FULMEN_LLM_PROXY_TARGET": ",".join(f"127.0.0.1:{proxy.parts.server.port}" for proxy in proxies),
            "FULMEN_TOKEN": proxies[0].signer.issue(Role.ADMIN, subject="tests", ttl_s=600),
            "COLUMNS": "300",
        }

    async def __call__(self, *arguments: str, target: str = "") -> Result:
        where = self.environment | ({"FULMEN_LLM_PROXY_TARGET": target} if target else {})
        return await asyncio.to_thread(CliRunner().invoke, app, ["proxy", *arguments], env=where)

    async def ok(self, *arguments: str) -> str:
        """Returns what a command prints that must succeed."""
        result = await self(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    async def start(self, *arguments: str, stdout: int) -> asyncio.subprocess.Process:
        """Starts a command as a process."""
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "fulmen_cli", "proxy", *arguments),
            env={**os.environ, **self.environment, "TERM": "xterm"},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stdout,
        )


@pytest.fixture
async def store() -> AsyncIterator[FakeStore]:
    """Yields a store."""
    async with FakeStore() as running:
        yield running


@pytest.fixture
async def backend() -> AsyncIterator[Backend]:
    """Yields a model server."""
    async with Backend() as running:
        yield running


@pytest.fixture
async def proxy(store: FakeStore) -> AsyncIterator[RunningProxy]:
    """Yields a proxy without routes and backends."""
    # It logs in this process: what it writes must not get into a command's output.
    with capture_logs():
        async with running_proxy(store.target) as running:
            yield running


@pytest.fixture
def fulmen(proxy: RunningProxy) -> Fulmen:
    """Returns the command line."""
    return Fulmen(proxy)


async def served(fulmen: Fulmen, backend: Backend) -> None:
    """Adds two backends and a route to them."""
    for name in ("one", "two"):
        await fulmen.ok("backend", "add", name, backend.url, "--token-ids")
    targets = ("--target", "one:byte-model@1=3", "--target", "two:byte-model@2")
    await fulmen.ok("route", "put", MODEL, "--policy", POLICY, *targets)


async def test_backends_are_added_drained_held_and_removed(fulmen: Fulmen, backend: Backend) -> None:
    limits = ("--rpm", "600", "--tpm", "90000", "--max-in-flight", "8")
    kind = ("--engine", "vllm", "--token-ids", "--api", "chat-completions", "--api", "count-tokens")
    screen = await fulmen.ok("backend", "add", "one", backend.url, *kind, *limits, "--key-name", "k")
    [listed] = json.loads(await fulmen.ok("backends", "-o", "json"))
    assert (listed["engine"], listed["returns_token_ids"], listed["key_name"]) == ("ENGINE_VLLM", True, "k")
    for arguments in (
        ("backend", "drain", "backends/one"),
        ("backends",),
        ("backend", "resume", "one"),
        ("backend", "hold", "one", "--ttl", "30"),
        ("backend", "release", "one"),
        ("backend", "delete", "one"),
        ("backends",),
    ):
        screen += f"$ fulmen proxy {' '.join(arguments)}\n{await fulmen.ok(*arguments)}"
    check_screen("proxy-backend", screen)


async def test_a_backend_has_headers_of_its_own_and_drops_parameters(fulmen: Fulmen, backend: Backend) -> None:
    headers = ("--header", "X-Title=Support", "--header", "HTTP-Referer=https://a.example/?b=c")
    screen = await fulmen.ok("backend", "add", "one", backend.url, *headers, "--drop-params")
    assert "HTTP-Referer=https://a.example/?b=c, X-Title=Support" in screen
    [listed] = json.loads(await fulmen.ok("backends", "-o", "json"))
    assert listed["headers"] == {"X-Title": "Support", "HTTP-Referer": "https://a.example/?b=c"}
    assert listed["drop_params"] is True
    wrong = await fulmen(
        "backend", "add", "one", backend.url, "--header", "X-Title", "--header", "a=1", "--header", "a=2"
    )
    assert wrong.exit_code == Exit.USAGE
    assert "--header X-Title: is not of the form NAME=VALUE." in wrong.stderr
    assert "--header a=2: is given twice." in wrong.stderr


async def test_a_promotion_of_a_lower_version_says_so(fulmen: Fulmen, backend: Backend) -> None:
    await served(fulmen, backend)
    assert "is lower than" not in (await fulmen("promote", POLICY, "8")).stderr
    assert "Version 7 is lower than 8" in (await fulmen("promote", POLICY, "7")).stderr


async def test_a_route_is_put_shown_split_promoted_and_rolled_back(fulmen: Fulmen, backend: Backend) -> None:
    await served(fulmen, backend)
    options = ("--balancing", "prefix-cache", "--fallback", "other", "--deadline", "60", "--hedge", "0.25")
    override = ("--override", 'validation={"temperature": 0}')
    await fulmen.ok("route", "put", MODEL, "--target", "one:byte-model", *options, *override)
    shown = json.loads(await fulmen.ok("route", "show", MODEL, "-o", "json"))
    assert shown["balancing"] == "BALANCING_PREFIX_CACHE"
    assert (shown["fallbacks"], shown["deadline"], shown["hedge_delay"]) == (["routes/other"], "60s", "0.250s")
    assert shown["overrides"] == [{"mode": "validation", "request_fields_json": '{"temperature": 0}'}]
    check_screen("proxy-routes", await fulmen.ok("routes") + await fulmen.ok("route", "show", MODEL))
    check_screen("proxy-route-rollback", await fulmen.ok("route", "rollback", MODEL))
    by_version = json.loads(await fulmen.ok("route", "split", MODEL, "@1=5", "@2=95", "-o", "json"))
    by_backend = json.loads(await fulmen.ok("route", "split", MODEL, "backends/two=0", "-o", "json"))
    weights = [[target.get("weight", 0) for target in route["targets"]] for route in (by_version, by_backend)]
    assert weights == [[5, 95], [5, 0]]
    assert "version 8" in await fulmen.ok("promote", POLICY, "8")
    await fulmen.ok("route", "delete", MODEL)
    assert (await fulmen("route", "show", MODEL)).exit_code == Exit.NOT_FOUND


async def test_a_route_is_put_from_a_file_as_it_is_shown(fulmen: Fulmen, backend: Backend, tmp_path: Path) -> None:
    await served(fulmen, backend)
    file = tmp_path / "route.json"
    file.write_text(await fulmen.ok("route", "show", MODEL, "-o", "json"))
    await fulmen.ok("route", "delete", MODEL)
    put = json.loads(await fulmen.ok("route", "put", MODEL, "--file", str(file), "-o", "json"))
    assert put.pop("version") != json.loads(file.read_text())["version"]
    assert put.items() <= json.loads(file.read_text()).items()
    other = await fulmen("route", "put", "other", "--file", str(file), "--cache")
    assert other.exit_code == Exit.USAGE
    file.write_text('{"target": 1}')
    malformed = await fulmen("route", "put", MODEL, "--file", str(file))
    missing = await fulmen("route", "put", MODEL, "--file", str(tmp_path / "none"))
    assert (malformed.exit_code, missing.exit_code) == (Exit.USAGE, Exit.USAGE)
    check_screen("proxy-route-file-errors", other.stderr + malformed.stderr + missing.stderr, folder=str(tmp_path))


async def test_everything_that_is_wrong_is_told_at_once(fulmen: Fulmen, backend: Backend) -> None:
    targets = ("--target", "=1", "--target", "one@5", "--target", "one=99999999999")
    wrong = await fulmen("route", "put", MODEL, *targets, "--override", "train=[]", "--deadline", "0")
    assert wrong.exit_code == Exit.USAGE
    unknown = await fulmen("route", "put", MODEL, "--target", "x", "--target", "y")
    assert unknown.exit_code == Exit.NOT_FOUND
    refused = await fulmen("route", "put", "UPPER", "--target", "ONE", "--override", "night={}")
    assert refused.exit_code == Exit.USAGE
    shares = await fulmen("route", "split", MODEL, "one", "@x=1", "one=1", "one=2", "@1=3")
    assert shares.exit_code == Exit.USAGE
    check_screen("proxy-route-errors", wrong.stderr + unknown.stderr + refused.stderr + shares.stderr)
    assert (await fulmen("backend", "add", "one", "nowhere")).exit_code == Exit.USAGE
    assert (await fulmen("backend", "drain", "none")).exit_code == Exit.NOT_FOUND
    assert (await fulmen("promote", "none", "1")).exit_code == Exit.NOT_FOUND
    await served(fulmen, backend)
    assert (await fulmen("backend", "delete", "one")).exit_code == Exit.CONFLICT
    assert (await fulmen("backend", "health", "none")).exit_code == Exit.NOT_FOUND


@pytest.mark.parametrize("api", ["chat", "messages", "responses", "completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_call_prints_the_answer_and_what_it_took(
    fulmen: Fulmen, backend: Backend, api: str, stream: bool
) -> None:
    await served(fulmen, backend)
    result = await fulmen("call", MODEL, "hello", "--api", api, *(["--stream"] if stream else []))
    assert result.exit_code == 0, result.output
    said = result.stdout.strip()
    assert said == ("olleh" if api == "completions" else "You said: hello")
    assert result.stderr.startswith(f"{api}, ")
    assert result.stderr.strip().endswith("tokens")


async def test_a_call_that_is_refused_says_why(fulmen: Fulmen, backend: Backend) -> None:
    await served(fulmen, backend)
    for more in ([], ["--stream"]):
        unknown = await fulmen("call", "none", "hello", *more)
        assert unknown.exit_code == Exit.NOT_FOUND
        assert "404: " in unknown.stderr
        backend.switches.refusals.append(400)
        assert (await fulmen("call", MODEL, "hello", *more)).exit_code == Exit.USAGE
    events = (await fulmen.ok("call", MODEL, "hello", "--stream", "-o", "json")).splitlines()
    assert len(events) > 2
    assert all(json.loads(event)["object"] == "chat.completion.chunk" for event in events)


async def test_health_asks_every_proxy_and_says_which_does_not_answer(store: FakeStore, backend: Backend) -> None:
    with capture_logs():
        async with running_proxy(store.target) as first, running_proxy(store.target) as second:
            fulmen = Fulmen(first, second)
            await served(fulmen, backend)
            async with asyncio.timeout(LIMIT_S):
                while len(json.loads(await fulmen.ok("health", "-o", "json"))[1]["backends"]) < 2:
                    pass
            await fulmen.ok("call", MODEL, "hello")
            seen = json.loads(await fulmen.ok("health", "-o", "json"))
            counts = [sum(int(each.get("request_count", 0)) for each in proxy["backends"]) for proxy in seen]
            assert counts == [1, 0]
            table = await fulmen.ok("health")
            assert all(
                f"proxy {target}" in table for target in fulmen.environment["FULMEN_LLM_PROXY_TARGET"].split(",")
            )
            assert table.count("healthy") == 4
            known = f"127.0.0.1:{first.parts.server.port}"
            partly = await fulmen("health", target=f"{known},{NOBODY}")
            assert partly.exit_code == Exit.FAILED
            assert "does not answer" in partly.stdout
            assert "healthy" in partly.stdout
            assert (await fulmen("health", target=NOBODY)).exit_code == Exit.FAILED
            for command in ("health", "routes"):
                assert (await fulmen(command, target=" , ")).exit_code == Exit.USAGE


async def test_health_is_drawn_anew_on_a_terminal_until_it_is_interrupted(fulmen: Fulmen, backend: Backend) -> None:
    await served(fulmen, backend)
    screen, terminal = pty.openpty()
    reader, transport = await _reader(screen)
    process = await fulmen.start("health", "--watch", "--interval", "0.1", stdout=terminal)
    os.close(terminal)
    async with asyncio.timeout(LIMIT_S):
        await reader.readuntil(("░" * 8).encode())
        backend.switches.gate = asyncio.Event()
        call = asyncio.create_task(fulmen("call", MODEL, "hello"))
        await reader.readuntil("█".encode())
        backend.switches.gate.set()
        assert (await call).exit_code == 0
        process.send_signal(signal.SIGINT)
        assert await process.wait() == INTERRUPTED
    transport.close()


async def test_watch_prints_routes_and_then_each_change(fulmen: Fulmen, backend: Backend) -> None:
    await served(fulmen, backend)
    process = await fulmen.start("watch", stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    async with asyncio.timeout(LIMIT_S):
        assert b"routes/tiny  version 1: one model byte-model weight 3" in await process.stdout.readline()
        await fulmen.ok("promote", POLICY, "9")
        assert b"policy arithmetic version 9" in await process.stdout.readline()
        await fulmen.ok("route", "delete", MODEL)
        assert b"routes/tiny  deleted" in await process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == INTERRUPTED


async def _reader(screen: int) -> tuple[asyncio.StreamReader, asyncio.BaseTransport]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(screen, "rb"))
    return reader, transport


async def test_a_route_records_and_stops_and_keeps_its_other_settings(
    proxy: RunningProxy, fulmen: Fulmen, backend: Backend
) -> None:
    await proxy.register("one", backend.url)
    await proxy.put_route(target("one"))
    words = ("--sample", "0.25", "--redact", "email", "--pattern", r"customer=C-\d+", "--retention-days", "7")
    shown = await fulmen.ok("route", "record", MODEL, *words)
    assert "recording     0.25 of calls, redacts email, customer, 7 days" in shown
    before = json.loads(await fulmen.ok("route", "show", MODEL, "-o", "json"))
    off = json.loads(await fulmen.ok("route", "record", MODEL, "--off", "-o", "json"))
    assert {name for name in before if before[name] != off.get(name)} == {"recording", "version"}
    bad = await fulmen("route", "record", MODEL, "--off", "--sample", "0.5", "--pattern", "x")
    assert bad.exit_code == Exit.USAGE
    assert all(word in bad.output for word in ("--off cannot be combined", "--pattern x: must have the form"))
    bad = await fulmen("route", "record", MODEL, "--sample", "2", "--redact", "shoes", "--pattern", "a=x*")
    assert bad.exit_code == Exit.USAGE
    assert all(word in bad.output for word in ("sample_rate", "redact[0]", "matches the empty text"))


async def test_a_policy_gets_its_share_of_another_route(proxy: RunningProxy, fulmen: Fulmen, backend: Backend) -> None:
    await proxy.register("one", backend.url)
    await proxy.put_route(target("one"))
    await proxy.register("vendor", backend.url)
    await fulmen.ok("route", "put", "assistant", "--target", "vendor:a=3", "--target", "vendor:b=1")

    async def weights(percent: str) -> list[tuple[str, str, int]]:
        route = json.loads(
            await fulmen.ok("route", "canary", "assistant", "--policy", MODEL, "--percent", percent, "-o", "json")
        )
        return [(each["backend"], each["backend_model"], each.get("weight", 0)) for each in route["targets"]]

    one = ("backends/one", "byte-model")
    assert await weights("10") == [("backends/vendor", "a", 6750), ("backends/vendor", "b", 2250), (*one, 1000)]
    assert await weights("100") == [("backends/vendor", "a", 0), ("backends/vendor", "b", 0), (*one, 10_000)]
    assert await weights("0") == [("backends/vendor", "a", 5000), ("backends/vendor", "b", 5000), (*one, 0)]
    for policy in ("assistant", "nobody"):
        bad = await fulmen("route", "canary", "assistant", "--policy", policy, "--percent", "10")
        assert bad.exit_code in (Exit.USAGE, Exit.NOT_FOUND)
