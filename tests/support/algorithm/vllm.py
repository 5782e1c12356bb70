"""A real vLLM server on the CPU with a tiny model, in processes of its own."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_ports

__all__ = ["ADAPTER_RANK", "ENVIRONMENT", "MODEL", "VllmServer", "build_models", "running_vllm", "settled"]

ENVIRONMENT = Path(__file__).parents[3] / ".venv-vllm"
MODEL = "byte-model"
MAX_MODEL_LEN = 512
ADAPTER_RANK = 8

# On a machine that is busy with the other half of the suite; alone it takes under a minute.
START_LIMIT_S = 420.0
BUILD_LIMIT_S = 180.0
STOP_LIMIT_S = 20.0
CALL_LIMIT_S = 60.0
POLL_S = 0.25
ASK_AGAIN_S = 0.02
LOG_TAIL = 6000
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STATUS_OK = 200

JSON = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServer:
    """A server that answers; the calls are direct, past every proxy, and block."""

    root: str
    key: str = ""

    @property
    def url(self) -> str:
        """The base URL that an OpenAI client is given."""
        return f"{self.root}/v1"

    @property
    def _key(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def post(self, path: str, body: JSON | None = None) -> tuple[int, bytes]:
        data = b"" if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.root + path, data, {"Content-Type": "application/json"} | self._key)
        try:
            with urllib.request.urlopen(request, timeout=CALL_LIMIT_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def get(self, path: str) -> JSON:
        request = urllib.request.Request(self.root + path, headers=self._key)
        with urllib.request.urlopen(request, timeout=CALL_LIMIT_S) as answer:
            return dict(json.load(answer))

    def ask(self, path: str, body: JSON | None = None) -> JSON:
        """Posts to a path and returns the answer's JSON.

        Raises:
            AssertionError: if the status is not 200.
        """
        status, answer = self.post(path, body)
        assert status == STATUS_OK, (path, status, answer[:500])
        return dict(json.loads(answer))

    def complete(self, content: str, **fields: Any) -> JSON:
        """Makes a whole chat completion with token ids and log-probabilities."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}
        return self.ask("/v1/chat/completions", {"return_token_ids": True, "logprobs": True, **body})

    def pause(self, mode: str) -> None:
        """Stops generation; `keep` freezes the requests in flight, `wait` lets them end, `abort` ends them."""
        self.ask(f"/pause?mode={mode}")

    def load(self, weights: Path, version: int) -> None:
        """Loads other weights."""
        self.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}})
        self.ask("/update_weight_version", {"new_version": str(version)})

    def resume(self) -> None:
        self.ask("/resume")

    def weight_version(self) -> str:
        """Returns the version of its weights, `default` before the first update."""
        return str(self.get("/weight_info")["weight_version"])

    def gauge(self, name: str, *, labelled: str = "") -> float:
        """Returns a metric of its own metrics, summed over its series, or over those with a label (`name="value"`)."""
        request = urllib.request.Request(f"{self.root}/metrics", headers=self._key)
        with urllib.request.urlopen(request, timeout=CALL_LIMIT_S) as answer:
            text = answer.read().decode()
        lines = [line for line in text.splitlines() if line.startswith(f"{name}{{") and labelled in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


async def settled(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Returns when something holds at a process that cannot tell us so; asks again and again.

    Raises:
        TimeoutError: if it does not hold in time.
    """
    async with asyncio.timeout(limit_s):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 - another process has no event to wait for
            await asyncio.sleep(ASK_AGAIN_S)


def build_models(root: Path, *seeds: int) -> list[Path]:
    """Builds one model for each seed in a process of its own: torch need not be imported by the tests."""
    script = Path(__file__).with_name("vllm_model.py")
    command = [sys.executable, str(script), str(root), *map(str, seeds)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_LIMIT_S, check=False)
    assert built.returncode == 0, built.stderr[-LOG_TAIL:]
    return [root / f"seed-{seed}" for seed in seeds]


@contextlib.contextmanager
def running_vllm(model: Path, log: Path) -> Iterator[VllmServer]:
    """Runs a server until the block ends.

    Raises:
        AssertionError: if it does not answer in time; has the end of its log.
    """
    port = free_ports()[0]
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(model, port),
            cwd=log.parent,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    try:
        server = VllmServer(root=f"http://127.0.0.1:{port}")
        _await_health(server, process, log)
        yield server
    finally:
        _stop(process)


def _command(model: Path, port: int) -> list[str]:
    return [
        str(ENVIRONMENT / "bin" / "vllm"),
        *("serve", str(model), "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)),
        *("--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "32"),
        # So that the same greedy call gives the same metrics whatever came before it.
        *("--dtype", "float32", "--no-enable-prefix-caching"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        *("--enable-lora", "--max-lora-rank", str(ADAPTER_RANK)),
        # One process less to start; needs VLLM_ENABLE_V1_MULTIPROCESSING=0 on a CPU.
        *("--distributed-executor-backend", "uni"),
    ]


def _environment() -> dict[str, str]:
    return os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CACHE_ROOT": str(ENVIRONMENT / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def _end_with_parent() -> None:
    """Lets a process end when the one that started it dies, however that dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _await_health(server: VllmServer, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up_at = time.monotonic() + START_LIMIT_S
    while process.poll() is None and time.monotonic() < give_up_at:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.root}/health", timeout=5):
            return
        time.sleep(POLL_S)
    state = "did not answer in time" if process.poll() is None else f"ended with {process.returncode}"
    raise AssertionError(f"vLLM {state}:\n{log.read_text(errors='replace')[-LOG_TAIL:]}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ends the server and the processes of its group, which it may have left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_LIMIT_S)


BACKEND = "vllm"


INSTALL_LIMIT_S = 600


def require_vllm() -> None:
    """Installs vLLM in CI; elsewhere skips the test if it is missing."""
    if os.environ.get("CI"):
        subprocess.run(["tools/vllm_env.sh"], cwd=ENVIRONMENT.parent, check=True, timeout=INSTALL_LIMIT_S)
    elif not (ENVIRONMENT / ".setup-stamp").exists():
        pytest.skip("vLLM is not installed: `make vllm-env` installs it")
