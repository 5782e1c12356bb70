"""Proxies behind one address are added, drained and killed under running attempts: only calls in flight at a kill fail."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import pytest

from fulmen.rpc.channel import open_channel
from fulmen_service_kit.security.tokens import Role
from tests.support.llm_proxy.backend import Backend
from tests.support.llm_proxy.balancer import Balancer
from tests.support.llm_proxy.harness import running_proxy
from tests.support.llm_proxy.proxy_process import ProxyProcess, proxy_process
from tests.support.runner.fleet import stored_spans
from tests.support.runner.harness import SIGNING_KEY, RunnerProcess, bundle_of, rollouts_of, spec_of, token
from tests.support.runner.stores import Ended, RealStore

pytestmark = pytest.mark.timeout(900)

DEADLINE_S = 400
HELD = 12
CALLS = re.compile(r"^fulmen_llm_proxy_calls_total\{[^}]*\} (\S+)$", re.MULTILINE)
AGENT = """
import asyncio, os
from pathlib import Path
import httpx2

async def solve(task, context):
    folder, answered, slow = Path(task["folder"]), 0, task.get("slow", False)
    while not (folder / task["gate"]).exists() or answered < 2:
        if answered and not (folder / "slow").exists() if slow else (folder / "hold").exists():
            await asyncio.sleep(0.1)
            continue
        try:
            async with httpx2.AsyncClient(timeout=120, trust_env=False) as client:
                headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
                body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
                answer = await client.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json=body, headers=headers)
        except httpx2.TransportError:
            await asyncio.sleep(0.1)
            continue
        if answer.status_code == 503:  # as the vendors' clients do
            await asyncio.sleep(float(answer.headers["retry-after"]))
            continue
        assert answer.status_code == 200, answer.text
        answered += 1
        await asyncio.sleep(0.3)
    return answered
"""


class ProxyFleet:
    """Proxies of one store behind two balancers, one for HTTP and one for gRPC."""

    def __init__(self, store: RealStore, folder: Path, stack: AsyncExitStack) -> None:
        self._store, self._folder, self._stack = store, folder, stack
        self.proxies: list[ProxyProcess] = []
        self.http, self.grpc = list[int](), list[int]()

    async def add(self) -> ProxyProcess:
        """Starts a proxy, which gets connections from then on."""
        number = len(list(self._folder.glob("ready-*")))
        proxy = await self._stack.enter_async_context(
            proxy_process(
                self._store.target, self._folder / f"ready-{number}", signing_key=SIGNING_KEY, drain_grace_s=45
            )
        )
        self.http.append(proxy.ports["http_port"])
        self.grpc.append(proxy.ports["port"])
        return proxy

    def remove(self, proxy: ProxyProcess) -> None:
        """Takes a proxy out of both balancers."""
        self.http.remove(proxy.ports["http_port"])
        self.grpc.remove(proxy.ports["port"])


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[RealStore]:
    """Yields a real store."""
    async with RealStore(database_url, lease_ttl_s=30) as real:
        yield real


async def calls_at(proxy: ProxyProcess, least: int) -> None:
    """Returns when a proxy has answered so many calls."""
    while sum(map(float, CALLS.findall(await metrics_of(proxy)))) < least:  # noqa: ASYNC110  # state of another process
        await asyncio.sleep(0.1)


async def metrics_of(proxy: ProxyProcess) -> str:
    """Returns the page of a proxy's metrics."""
    async with proxy.http.get(f"{proxy.operator_url}/metrics") as answer:
        return await answer.text()


async def until_open(connection: asyncpg.Connection, count: int) -> None:
    """Returns when so many accounts are open."""
    query = "select count(*) from capture_account where is_open"
    while await connection.fetchval(query) != count:  # noqa: ASYNC110  # state of a database
        await asyncio.sleep(0.1)


@pytest.mark.long(short=True)
@pytest.mark.parametrize("attempts", [60, pytest.param(500, marks=pytest.mark.long)])
async def test_proxies_come_and_go_under_running_attempts(
    store: RealStore, database_url: str, tmp_path: Path, attempts: int
) -> None:
    async with asyncio.timeout(DEADLINE_S), AsyncExitStack() as stack, Backend() as backend:
        async with running_proxy(store.target, signing_key=SIGNING_KEY, backend_url=backend.url):
            pass  # puts the route
        connection = await asyncpg.connect(database_url)
        stack.push_async_callback(connection.close)
        fleet = ProxyFleet(store, tmp_path, stack)
        first, doomed = await fleet.add(), await fleet.add()
        http = await stack.enter_async_context(Balancer(fleet.http))
        grpc = await stack.enter_async_context(Balancer(fleet.grpc))
        settings = {
            "store_target": store.target,
            "llm_proxy_url": f"http://{http.address}",
            "llm_proxy_targets": grpc.address,
            "slots": attempts,
            "instrument": "none",
            "log_level": "debug",
        }
        runner = RunnerProcess(settings)
        stack.push_async_callback(runner.close)
        await runner.start()
        bundle = await store.publish("bundle.fleet", bundle_of({"agent.py": AGENT}))
        agent = await store.publish("agent.fleet", spec_of(bundle=bundle, python="agent.py:solve"))
        half = attempts // 2
        tasks = [{"folder": str(tmp_path), "gate": "drained" if n < half else "killed"} for n in range(attempts - HELD)]
        tasks += [{"folder": str(tmp_path), "gate": "killed", "slow": True} for _ in range(HELD)]
        names = await store.create(rollouts_of(agent, list(tasks), timeout_s=600))
        await runner.logged("attempt_started", count=attempts, deadline_s=120)
        await calls_at(first, attempts)

        # One is added, another one is drained.
        added = await fleet.add()
        await calls_at(added, attempts // 4)
        fleet.remove(first)
        first.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await first.process.wait() == 0, "".join(first.log)
        (tmp_path / "drained").touch()
        before = await store.ended(names[:half])
        assert Counter(one.kind for ended in before.values() for one in ended) == {"": half}

        # Nobody calls but a few, whose calls wait at the backend when one of the two proxies is killed.
        (tmp_path / "hold").touch()
        await until_open(connection, 0)
        backend.switches.gate = asyncio.Event()
        (tmp_path / "slow").touch()
        await until_open(connection, HELD)
        lost = int(await doomed.metric("fulmen_llm_proxy_calls_in_flight"))
        assert 0 < lost < HELD
        fleet.remove(doomed)
        await doomed.kill()
        backend.switches.gate.set()
        (tmp_path / "killed").touch()
        after = await store.ended(names[half:])
        kinds = Counter(one.kind for ended in after.values() for one in ended)
        assert kinds == {"": attempts - half, "INFRA": lost}, kinds
        succeeded = {ended[-1].attempt: ended[-1] for ended in (before | after).values()}
        await check_captures(store, succeeded)


async def check_captures(store: RealStore, succeeded: dict[str, Ended]) -> None:
    """Checks that the store has each answered call of an attempt once."""
    async with open_channel(store.target, token=token(Role.CLIENT)) as channel:
        spans = await stored_spans(channel, list(succeeded))
    for name, ended in succeeded.items():
        ids = [span_id for kind, span_id in spans[name] if kind.startswith("chat")]
        assert len(ids) == len(set(ids)) == int(ended.output), name
