"""A service as a process: ready file, OTLP, /metrics, and its exit status."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from fulmen.errors import FulmenError
from fulmen.rpc.channel import open_channel
from fulmen.rpc.tls import TlsFiles
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.store.v1 import rollout_service_pb2_grpc as rpc
from fulmen_service_kit import probe as probe_script
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.certificates import Authority, Pair
from tests.support.service_kit.otlp_collector import Collector, running_collector

KEY = "k" * 32
LIMIT_S = 60
BLOCKING = "fulmen.store.v1.RolloutService/ListRollouts"
QUICKLY = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_METRIC_EXPORT_INTERVAL": "100"}
PROGRAM = Path(__file__).parents[2] / "support" / "service_kit" / "sample_service.py"


@pytest_asyncio.fixture
async def collector() -> AsyncIterator[tuple[Collector, str]]:
    """Yields a collector and where it listens."""
    async with running_collector() as found:
        yield found


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The running sample."""

    process: subprocess.Popen[bytes]
    ports: dict[str, int]
    log: Path
    stub: rpc.RolloutServiceStub

    def logged(self, event: str) -> list[dict[str, object]]:
        """Returns the log lines of an event."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    async def ended(self) -> int:
        """Waits for its end; returns its exit status."""
        return await asyncio.to_thread(self.process.wait, LIMIT_S)


@asynccontextmanager
async def sample(
    folder: Path, *, tls: TlsFiles | None = None, environment: Mapping[str, str] | None = None, **settings: str
) -> AsyncIterator[Sample]:
    """Starts the sample and waits until it serves; ends it if it still runs."""
    ready = folder / "ready.json"
    whole = {
        **os.environ,
        **(environment or {}),
        "FULMEN_SAMPLE_SIGNING_KEY": KEY,
        "FULMEN_SAMPLE_READY_FILE": str(ready),
        **{f"FULMEN_SAMPLE_{name.upper()}": value for name, value in settings.items()},
    }
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen([sys.executable, PROGRAM, "serve"], env=whole, stderr=output)
    try:
        async with asyncio.timeout(LIMIT_S):
            while not ready.exists():
                assert process.poll() is None
                await asyncio.sleep(0.05)
        ports = json.loads(ready.read_text())
        token = TokenSigner(KEY).issue(Role.ADMIN, subject="tests", ttl_s=600)
        async with open_channel(f"127.0.0.1:{ports['port']}", token=token, tls=tls) as channel:
            yield Sample(process=process, ports=ports, log=log, stub=rpc.RolloutServiceStub(channel))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(LIMIT_S)


async def test_a_service_exports_its_rpcs_by_otlp_and_exits_with_0_on_sigterm(
    tmp_path: Path, collector: tuple[Collector, str]
) -> None:
    found, endpoint = collector
    async with sample(tmp_path, otlp_endpoint=endpoint) as service:
        await service.stub.GetRollout(pb.GetRolloutRequest(name="x"))
        service.process.send_signal(signal.SIGTERM)
        status = await service.ended()

    assert status == 0
    assert "fulmen.store.v1.RolloutService/GetRollout" in found.names
    assert "rpc.server.duration" in found.metrics


def asking(authority: Authority, pair: Pair) -> grpc.ServerCredentials:
    """Returns the credentials of a server that takes clients of the same authority alone."""
    chain = [(pair.key.read_bytes(), pair.certificate.read_bytes())]
    return grpc.ssl_server_credentials(chain, authority.file.read_bytes(), require_client_auth=True)


@pytest.mark.long(short=True)
async def test_a_service_exports_to_a_collector_by_mtls_and_continues_with_renewed_certificates(tmp_path: Path) -> None:
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    own = old.issue("service")
    known = tmp_path / "known.pem"
    known.write_bytes(old.file.read_bytes())
    settings = {**own.settings(), "tls_ca_file": str(known)}
    async with AsyncExitStack() as stack:
        async with running_collector(asking(old, old.issue("collector"))) as (first, endpoint):
            tls = TlsFiles(ca_file=str(known))
            running = sample(tmp_path, tls=tls, environment=QUICKLY, otlp_endpoint=endpoint, **settings)
            service = await stack.enter_async_context(running)
            await until_exported(service, first)
        # Another authority on both sides: nothing of the old files would be taken.
        known.write_bytes(new.file.read_bytes())
        new.issue("service", to=own)
        port = int(endpoint.rpartition(":")[2])
        async with running_collector(asking(new, new.issue("collector")), port=port) as (second, _):
            await until_exported(service, second)


async def until_exported(service: Sample, collector: Collector) -> None:
    """Calls the service until a collector has heard of it, by spans and by metrics."""
    async with asyncio.timeout(LIMIT_S):
        while not (collector.spans and collector.metrics):
            with suppress(FulmenError):
                await service.stub.GetRollout(pb.GetRolloutRequest(name="x"))
            await asyncio.sleep(0.1)


async def test_a_service_shows_its_metrics_and_health_over_http_until_it_is_gone(tmp_path: Path) -> None:
    async with sample(tmp_path) as service, aiohttp.ClientSession() as http:
        await service.stub.GetRollout(pb.GetRolloutRequest(name="x"))
        port = service.ports["metrics_port"]

        async def shown(page: str) -> tuple[int, str]:
            async with http.get(f"http://127.0.0.1:{port}/{page}") as answer:
                return answer.status, await answer.text()

        assert 'rpc_method="/fulmen.store.v1.RolloutService/GetRollout"' in (await shown("metrics"))[1]
        assert await shown("healthz") == (200, "ok\n")
        status, ready = await shown("readyz")
        assert (status, json.loads(ready)) == (200, {"ready": True, "parts": {"service": "ok"}})
        assert (await shown("elsewhere"))[0] == 404
        probe = [sys.executable, "-I", "-S", probe_script.__file__, f"127.0.0.1:{port}/readyz"]
        serving = await asyncio.to_thread(subprocess.run, probe, check=False, capture_output=True, timeout=LIMIT_S)
    gone = await asyncio.to_thread(subprocess.run, probe, check=False, capture_output=True, timeout=LIMIT_S)
    assert (serving.returncode, gone.returncode) == (0, 1)


async def test_an_rpc_that_blocks_the_event_loop_is_counted_and_named(tmp_path: Path) -> None:
    async with sample(tmp_path, loop_probe_interval_s="0.01") as service, aiohttp.ClientSession() as http:
        async with asyncio.timeout(LIMIT_S):
            while not (
                named := [line for line in service.logged("loop_blocked") if str(line["work"]).endswith(BLOCKING)]
            ):
                await service.stub.ListRollouts(pb.ListRolloutsRequest())
        async with http.get(f"http://127.0.0.1:{service.ports['metrics_port']}/metrics") as answer:
            metrics = await answer.text()

    assert named[0]["place"] == "__main__:SampleServicer.ListRollouts"
    blocked = {family.name: family.samples for family in text_string_to_metric_families(metrics)}
    assert sum(each.value for each in blocked["loop_blocked"] if each.name == "loop_blocked_total") >= 1
    assert "0.02" in {each.labels.get("le") for each in blocked["loop_lag_seconds"]}


async def test_a_background_role_that_dies_stops_the_service_with_status_1(tmp_path: Path) -> None:
    async with sample(tmp_path) as service:
        await service.stub.CancelRollouts(pb.CancelRolloutsRequest())
        status = await service.ended()

    assert status == 1
