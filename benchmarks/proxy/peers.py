"""The peers: each in an environment of its own, at pinned versions, over the same backend.

`python -m benchmarks.proxy.peers` only makes the environments.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from benchmarks.proxy import processes
from benchmarks.proxy.cases import Case, Identity, Target

HOME = Path(__file__).parents[1] / ".peers"
PATH = "/v1/chat/completions"
START_LIMIT_S = 180.0
LITELLM = "LiteLLM 1.106.2"
AGENT_LIGHTNING_0 = "Agent Lightning 0.3.0"
AGENT_LIGHTNING_1 = "Agent Lightning 1.0.2"
VLLM_ROUTER = "vLLM router 0.1.17"
FLOOR = "uvicorn + aiohttp, pass-through"
# They ask the network for a price list when they are imported; the list that they ship will do.
_ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "PYTHONPATH": ""}

Start = Callable[["Peer", str, Path], AbstractAsyncContextManager[Target]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A peer.

    Attributes:
        key: what `--peers` calls it.
        folder: its environment under `.peers`; empty: it runs in this one.
        warm_calls: calls that are not measured.
        rounds: how often each case is measured; a slow one is measured once.
    """

    key: str
    name: str
    start: Start
    folder: str = ""
    python: str = "3.11"
    requirements: tuple[str, ...] = ()
    warm_calls: int = 20
    rounds: int = 1

    def program(self, name: str) -> str:
        """Returns the path of a program in its environment."""
        return str(HOME / self.folder / "bin" / name) if self.folder else sys.executable


def _interpreter(version: str) -> str:
    """Returns an interpreter of pyenv's, where uv does not look, or the version for uv to find or to fetch."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = sorted(root.glob(f"versions/{version}.*/bin/python{version}"))
    return str(found[-1]) if found else version


def installed(peer: Peer) -> None:
    """Makes the peer's environment, if it is not there.

    Raises:
        subprocess.CalledProcessError: if that fails; its output is on standard error.
    """
    home = HOME / peer.folder
    if not peer.folder or (home / "complete").exists():
        return
    shutil.rmtree(home, ignore_errors=True)
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    subprocess.run([uv, "venv", "-q", "--python", _interpreter(peer.python), str(home)], check=True)
    subprocess.run([uv, "pip", "install", "-q", "--python", str(home / "bin/python"), *peer.requirements], check=True)
    (home / "complete").touch()


@asynccontextmanager
async def running(peer: Peer, backend: str) -> AsyncIterator[Target]:
    """Runs a peer over the backend.

    Raises:
        RuntimeError, TimeoutError: if it does not serve; the message has the end of its log.
    """
    await asyncio.to_thread(installed, peer)
    with tempfile.TemporaryDirectory(prefix="fulmen-peer-") as folder:
        async with peer.start(peer, backend, Path(folder)) as target:
            yield target


def _target(
    peer: Peer,
    process: asyncio.subprocess.Process,
    port: int,
    path: str = PATH,
    *,
    key: str = "none",
    injects: bool = False,
) -> Target:
    async def identities(_: Case, __: int) -> list[Identity]:
        return [(path, key)]

    return Target(
        name=peer.name,
        addresses=[f"127.0.0.1:{port}"],
        pids=lambda: processes.tree(process.pid),
        identities=identities,
        injects=injects,
    )


@asynccontextmanager
async def _serving(
    folder: Path, port: int, health: str, *command: str, more: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    log = folder / "log"
    environment = {**_ENVIRONMENT, **(more or {})}
    async with processes.running(*command, log=log, environment=environment, folder=folder) as process:
        try:
            await processes.answering(f"http://127.0.0.1:{port}{health}", process, START_LIMIT_S)
        except (RuntimeError, TimeoutError) as error:
            raise RuntimeError(f"{error or 'no answer'}: {log.read_text(errors='replace')[-500:]}") from error
        yield process


@asynccontextmanager
async def _litellm(peer: Peer, backend: str, folder: Path) -> AsyncIterator[Target]:
    port, config = processes.free_port(), folder / "config.json"
    parameters = {"model": "openai/canned", "api_base": f"http://{backend}/v1", "api_key": "none"}
    # JSON is YAML.
    config.write_text(json.dumps({"model_list": [{"model_name": "canned", "litellm_params": parameters}]}))
    arguments = ("--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1")
    key = f"sk-{secrets.token_hex(32)}"  # it does not start without one
    more = {"LITELLM_MASTER_KEY": key}
    async with _serving(folder, port, "/health/liveliness", peer.program("litellm"), *arguments, more=more) as process:
        yield _target(peer, process, port, key=key)


@asynccontextmanager
async def _agent_lightning_0(peer: Peer, backend: str, folder: Path) -> AsyncIterator[Target]:
    port, ready = processes.free_port(), folder / "ready"
    script = str(Path(__file__).with_name("agent_lightning_0_3.py"))
    arguments = (script, str(port), str(processes.free_port()), backend, str(ready))
    async with _serving(folder, port, "/health/liveliness", peer.program("python"), *arguments) as process:
        async with asyncio.timeout(START_LIMIT_S):
            while not ready.exists():  # a file of another process
                await asyncio.sleep(0.1)
        yield _target(peer, process, port, ready.read_text(), injects=True)


@asynccontextmanager
async def _agent_lightning_1(peer: Peer, backend: str, folder: Path) -> AsyncIterator[Target]:
    port = processes.free_port()
    arguments = ("host=127.0.0.1", f"port={port}", "default_proxy.model_name=canned", f"hydra.run.dir={folder}/run")
    async with _serving(folder, port, "/healthz", peer.program("agl-server"), *arguments) as process:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", raise_for_status=True) as session:
            model = {"model": "canned", "endpoint": f"http://{backend}/v1"}
            async with session.post("/api/models", json=[model]):
                pass
            async with session.post("/api/rollouts", json=[{"input": "benchmark"}]) as answer:
                rollout = (await answer.json())[0]["rollout_id"]
        path = f"/proxy/rollout/{rollout}/attempt/0/mode/train/openai{PATH}"
        yield _target(peer, process, port, path, injects=True)


@asynccontextmanager
async def _vllm_router(peer: Peer, backend: str, folder: Path) -> AsyncIterator[Target]:
    port = processes.free_port()
    arguments = (
        "--worker-urls", f"http://{backend}", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin",
        "--prometheus-port", str(processes.free_port()), "--log-level", "error",
    )  # fmt: skip
    async with _serving(folder, port, "/health", peer.program("vllm-router"), *arguments) as process:
        yield _target(peer, process, port)


@asynccontextmanager
async def _pass_through(peer: Peer, backend: str, folder: Path) -> AsyncIterator[Target]:
    port, script = processes.free_port(), str(Path(__file__).with_name("passthrough.py"))
    async with _serving(folder, port, "/health", peer.program("python"), script, str(port), backend) as process:
        yield _target(peer, process, port)


PEERS = (
    Peer(key="floor", name=FLOOR, start=_pass_through, warm_calls=200, rounds=2),
    Peer(
        key="vllm-router",
        name=VLLM_ROUTER,
        start=_vllm_router,
        folder="vllm-router-0.1.17",
        requirements=("vllm-router==0.1.17",),
        warm_calls=200,
        rounds=2,
    ),
    Peer(
        key="agent-lightning-1",
        name=AGENT_LIGHTNING_1,
        start=_agent_lightning_1,
        folder="agent-lightning-1.0.2",
        python="3.12",  # it needs this or newer
        requirements=("agentlightning==1.0.2",),
    ),
    Peer(
        key="litellm",
        name=LITELLM,
        start=_litellm,
        folder="litellm-1.106.2",
        requirements=("litellm[proxy]==1.106.2",),
    ),
    Peer(
        key="agent-lightning-0",
        name=AGENT_LIGHTNING_0,
        start=_agent_lightning_0,
        folder="agent-lightning-0.3.0",
        # It sets no upper bound on OpenTelemetry, and today's breaks it. The store's benchmark has the same.
        requirements=(
            "agentlightning==0.3.0",
            "opentelemetry-api==1.39.1",
            "opentelemetry-sdk==1.39.1",
            "opentelemetry-exporter-otlp==1.39.1",
        ),
    ),
)

if __name__ == "__main__":
    for one in PEERS:
        installed(one)
