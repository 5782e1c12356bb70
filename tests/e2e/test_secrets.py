"""Secrets and vendors' keys under the processes of `fulmen up`: set with the command, used without a restart."""

from __future__ import annotations

import asyncio
import json
import sys
import tarfile
from pathlib import Path

import aiohttp
import pytest

from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2, route_pb2, route_service_pb2
from fulmen.store.v1 import rollout_pb2
from fulmen.train_toml.agent import AgentConfig
from tests.support.algorithm.runs import create_rollouts, ended_rollout, publish_agent
from tests.support.end_to_end import World
from tests.support.llm_proxy.backend import Backend

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(600)]

LIMIT_S = 30
VALUE = "sunny-and-warm-0123456789"
AGENT = """
import json, os
value = os.environ.get("WEATHER_KEY", "")
print(json.dumps({"value": value, "length": len(value)}))
print(1.0)
"""


async def test_an_agent_gets_the_secret_that_it_names_and_the_support_bundle_does_not(
    world: World, tmp_path: Path
) -> None:
    (tmp_path / "value").write_text(VALUE)
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/agent.py").write_text(AGENT)
    done = await world.fulmen("secret", "set", "WEATHER_KEY", "--from-file", tmp_path / "value")
    assert done.status == 0, done.stderr
    said = []
    for secrets in (("WEATHER_KEY",), ()):
        agent = AgentConfig(command=(sys.executable, "agent.py"), secrets=secrets)
        version = await publish_agent(world.client, tmp_path / "agent", f"secrets-{len(secrets)}", agent)
        [name] = await create_rollouts(world.client, version, [b"{}"])
        rollout = await ended_rollout(world.client, name)
        assert rollout.state == rollout_pb2.ROLLOUT_STATE_SUCCEEDED, rollout
        said.append(json.loads(rollout.attempts[0].output.splitlines()[0]))
    assert said == [{"value": "[masked]", "length": len(VALUE)}, {"value": "", "length": 0}]

    bundle = tmp_path / "support.tar.gz"
    done = await world.fulmen("support-bundle", "--file", bundle)
    assert bundle.exists(), done.stdout + done.stderr
    with tarfile.open(bundle) as archive:
        files = [archive.extractfile(member) for member in archive.getmembers() if member.isfile()]
        assert not any(VALUE.encode() in file.read() for file in files if file is not None)
    logs = [path.read_bytes() for path in world.stack.folder.logs.glob("*.log")]
    assert logs
    assert not any(VALUE.encode() in each for each in logs)


@pytest.mark.long(short=True)
async def test_a_changed_vendors_key_reaches_the_vendor_without_a_restart(world: World, tmp_path: Path) -> None:
    key = tmp_path / "key"
    async with Backend() as vendor, aiohttp.ClientSession() as session:
        backend = backend_pb2.Backend(name="backends/vendor", base_url=vendor.url, key_name="vendor")
        await world.client.backends.RegisterBackend(backend_service_pb2.RegisterBackendRequest(backend=backend))
        route = route_pb2.Route(name="routes/vendors", targets=[route_pb2.RouteTarget(backend=backend.name, weight=1)])
        await world.client.routes.PutRoute(route_service_pb2.PutRouteRequest(route=route))

        async def until_sent(value: str) -> None:
            key.write_text(value)
            done = await world.fulmen("secret", "set", "vendor", "--from-file", key, "--host", "127.0.0.1")
            assert done.status == 0, done.stderr
            body = {"model": "vendors", "messages": [{"role": "user", "content": "hello"}]}
            headers = {"Authorization": f"Bearer {world.stack.client_token}"}
            url = f"{world.stack.targets['llm_proxy_http']}/v1/chat/completions"
            async with asyncio.timeout(LIMIT_S):
                while not vendor.received or vendor.received[-1].headers["Authorization"] != f"Bearer {value}":
                    async with session.post(url, json=body, headers=headers) as answer:
                        await answer.read()
                    await asyncio.sleep(0.1)

        for value in ("sk-the-first-key", "sk-the-second-key"):
            await until_sent(value)
