"""The processes of the chart's pods start as they are rendered, connect, run an agent, and stop; also by mTLS.

No cluster: the containers' programs run here, with the variables, files and arguments that the pods would give them.
Names of Services become this machine's, ports free ones. Helm renders the chart (tools/helm_toolchain.sh).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from fulmen.rpc.channel import open_channel
from fulmen.rpc.tls import TlsFiles
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2, rollout_service_pb2_grpc
from fulmen_service_kit.security.keys import attempt_secrets
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.certificates import Authority
from tests.support.deploy.helm_chart import Manifests, component_of, render
from tests.support.ports import free_ports
from tests.support.postgres import shared_server

LIMIT_S = 90.0
SIGNING_KEY = "a signing key of tests, 32 bytes or more"
VALUES: dict[str, Any] = {
    "store": {"replicas": 1, "drainGraceSeconds": 2},
    "llmProxy": {"replicas": 1, "drainGraceSeconds": 2},
    "runner": {
        "replicas": 1,
        "drainGraceSeconds": 2,
        "settings": {"AGENT": "/agents/agent.py:solve", "ISOLATION": "trusted", "INSTRUMENT": "none"},
    },
    "algorithm": {"drainGraceSeconds": 2},
}
MUTUAL_TLS: dict[str, Any] = {
    "tls": {
        "clientCertificates": True,
        "certManager": {"enabled": True, "issuerRef": {"name": "internal"}},
    }
}
# Calls the proxy and sends a span to the store, with what the runner gives it and nothing else.
AGENT = """
import json, os, urllib.request
import fulmen

def solve(task):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/models", headers=headers)
    with urllib.request.urlopen(request) as answer:
        json.load(answer)
    fulmen.emit_reward(1.0)
"""
PROGRAMS = {"store": "fulmen_store", "migration": "fulmen_store", "llm-proxy": "fulmen_llm_proxy",
            "runner": "fulmen_runner", "algorithm": "fulmen_algorithm"}  # fmt: skip
PORTS = ("7101", "7102", "7103", "7104", "7200", "7201", "7202", "7301", "7302", "7310", "7401", "7402")


class Pods:
    """Containers of a release as processes; `folder` stands for the root of their file systems."""

    def __init__(self, release: Manifests, folder: Path) -> None:
        self._release = release
        self._folder = folder
        self._ports = dict(zip(PORTS, map(str, free_ports(len(PORTS))), strict=True))
        self.running: dict[str, asyncio.subprocess.Process] = {}

    def write(self, component: str, path: str, content: str | bytes) -> None:
        """Puts a file where a pod would have it mounted."""
        file = self._folder / component / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    def container(self, component: str) -> dict[str, Any]:
        """Returns the container of a component; there is one, besides those that prepare."""
        [found] = [spec["containers"][0] for owner, _, spec in self._release.pods() if component_of(owner) == component]
        return found

    async def start(self, component: str) -> asyncio.subprocess.Process:
        """Starts a container's program."""
        container = self.container(component)
        command = [sys.executable, "-m", PROGRAMS.get(component, "fulmen_cli")]
        command += container.get("args", ["serve"]) if component in PROGRAMS else container["command"][1:]
        folder = self._folder / component / "var/lib/fulmen"
        folder.mkdir(parents=True, exist_ok=True)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("FULMEN_")}
        environment = {**kept, "HOME": str(folder), **self._variables(component, container)}
        process = await asyncio.create_subprocess_exec(
            *command, env=environment, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        self.running[component] = process
        return process

    async def ready(self, component: str) -> None:
        """Waits until a container's readiness probe is answered with 200, as the kubelet asks: no certificate is checked."""
        container = self.container(component)
        probe = container["readinessProbe"]["httpGet"]
        [port] = [each["containerPort"] for each in container["ports"] if each["name"] == probe["port"]]
        url = f"{probe.get('scheme', 'HTTP').lower()}://127.0.0.1:{self._ports[str(port)]}{probe['path']}"
        answer = "nothing"
        try:
            async with asyncio.timeout(LIMIT_S):
                while (answer := await asyncio.to_thread(answer_of, url)) != "200":
                    assert self.running[component].returncode is None, await self.said(component)
                    await asyncio.sleep(0.2)
        except TimeoutError:
            self.running[component].kill()
            pytest.fail(f"{component} is not ready: {answer}\n{await self.said(component)}")

    async def said(self, component: str) -> str:
        """Returns what a container's program has printed, once it has ended."""
        output, _ = await self.running[component].communicate()
        return output.decode(errors="replace")[-4000:]

    async def rollout(self) -> str:
        """Runs the agent once, as a client that the test's pod could be; returns the rollout's last state."""
        variables = self._variables("test", self.container("test"))
        tls = TlsFiles.from_environment(variables)
        async with open_channel(variables["FULMEN_STORE_TARGET"], token=variables["FULMEN_TOKEN"], tls=tls) as channel:
            stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
            wanted = rollout_pb2.Rollout(input=b"{}", policy=rollout_pb2.RolloutPolicy(max_attempts=1))
            created = await stub.BatchCreateRollouts(
                rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=[wanted], request_id="one")
            )
            request = rollout_service_pb2.GetRolloutRequest(name=created.rollouts[0].name)
            async with asyncio.timeout(LIMIT_S):
                while True:
                    found = (await stub.GetRollout(request)).rollout
                    state = rollout_pb2.RolloutState.Name(found.state)
                    if state not in {"ROLLOUT_STATE_QUEUED", "ROLLOUT_STATE_RUNNING", "ROLLOUT_STATE_RETRY_WAIT"}:
                        return state if state == "ROLLOUT_STATE_SUCCEEDED" else str(found)
                    await asyncio.sleep(0.1)

    def _variables(self, component: str, container: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {"POD_IP": "127.0.0.1", "POD_NAME": "fulmen-algorithm-0"}
        for variable in container["env"]:
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference is not None:
                path = self._folder / component / "etc/fulmen/secrets" / reference["key"]
                found[variable["name"]] = path.read_text()
            elif "value" in variable:
                found[variable["name"]] = self._here(component, variable["value"], found)
        return found

    def _here(self, component: str, value: str, known: dict[str, str]) -> str:
        for name in ("POD_IP", "POD_NAME"):
            value = value.replace(f"$({name})", known[name])
        value = re.sub(r"[a-z0-9.-]+\.fulmen\.svc", "localhost", value)
        value = re.sub(r"(?<![0-9])(\d{4})$", lambda match: self._ports.get(match[1], match[1]), value)
        if value.startswith(("/etc/fulmen/", "/var/lib/fulmen", "/agents/")):
            return str(self._folder / component / value.lstrip("/"))
        return "127.0.0.1" if value == "0.0.0.0" else value


def answer_of(url: str) -> str:
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(url, timeout=5, context=trusting) as answer:
            return str(answer.status)
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read(500).decode(errors='replace')}"
    except OSError as error:
        return str(error)


@pytest.fixture(params=[{"tls": {"enabled": False}}, MUTUAL_TLS], ids=["plain", "mtls"])
async def pods(request: pytest.FixtureRequest, short_tmp_path: Path) -> AsyncIterator[Pods]:
    release = render({**VALUES, **request.param})
    pods = Pods(release, short_tmp_path)
    signer = TokenSigner(SIGNING_KEY)
    secrets = {
        "signing-key": SIGNING_KEY,
        "attempt-key-secret": attempt_secrets(SIGNING_KEY),
        "service-token": signer.issue(Role.SERVICE, subject="services", ttl_s=3600, project="projects/*"),
        "runner-token": signer.issue(Role.RUNNER, subject="runners", ttl_s=3600, project="projects/*"),
        "engine-token": "a token of the engines",
        "backend-keys": '{"engine": {"key": "a token of the engines", "hosts": ["*"]}}',
    }
    database = shared_server().fresh_database(migrated=False)
    authority = Authority(short_tmp_path)
    for component in (*PROGRAMS, "test"):
        for key, value in secrets.items():
            pods.write(component, f"/etc/fulmen/secrets/{key}", value)
        pods.write(component, "/etc/fulmen/database/url", database)
        # The test's pod shows the store's certificate.
        named = {"test": "store", "migration": "store"}.get(component, component)
        names = [each["spec"]["dnsNames"] for each in release.of("Certificate") if component_of(each) == named]
        pair = authority.issue(component, dns=tuple(names[0]) if names else ("localhost",))
        pods.write(component, "/etc/fulmen/tls/tls.crt", pair.certificate.read_bytes())
        pods.write(component, "/etc/fulmen/tls/tls.key", pair.key.read_bytes())
        pods.write(component, "/etc/fulmen/tls/ca.crt", authority.file.read_bytes())
        pods.write(component, "/etc/fulmen/authorities/ca.crt", authority.file.read_bytes())
    pods.write("runner", "/agents/agent.py", AGENT)
    yield pods
    for process in pods.running.values():
        if process.returncode is None:
            process.kill()
            await process.communicate()
    shared_server().drop(database)


@pytest.mark.timeout(300)
async def test_the_pods_of_a_release_work_together(pods: Pods) -> None:
    migration = await pods.start("migration")
    async with asyncio.timeout(LIMIT_S):
        output, _ = await migration.communicate()
    assert (migration.returncode, output.decode().splitlines()[-1]) == (0, "The schema is up to date.")
    services = ("store", "llm-proxy", "algorithm", "runner")
    for component in services:
        await pods.start(component)
    for component in services:
        await pods.ready(component)
    # What `helm test` runs.
    doctor = await pods.start("test")
    async with asyncio.timeout(LIMIT_S):
        output, _ = await doctor.communicate()
    assert doctor.returncode == 0, output.decode()
    assert await pods.rollout() == "ROLLOUT_STATE_SUCCEEDED"
    for component in reversed(services):
        process = pods.running[component]
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(LIMIT_S):
            output, _ = await process.communicate()
        assert process.returncode == 0, output.decode()[-4000:]
