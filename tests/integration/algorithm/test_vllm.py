"""How vLLM is started and swapped, with a recording program in its place."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fulmen_algorithm.engines.engine import EngineAddress, EngineFailed, EngineKind, EngineOptions
from fulmen_algorithm.engines.external import ExternalVllm
from fulmen_algorithm.engines.vllm import VllmProcess
from fulmen_algorithm.policy.engine_settings import ExternalEngine, VllmEngine
from fulmen_algorithm.runs.ports import PublishedPolicy
from fulmen_algorithm.training.settings import WeightsKind
from tests.support.algorithm.vllm import settled
from tests.support.processes import alive

LIMIT_S = 30
TOKEN = "the engines' key"
# Writes what it is asked into a file beside it, and answers 500 to the path in another one, 200 to all else. With each
# thing that it is told it has sampled three tokens more.
PROGRAM = """\
#!{python}
import http.server, json, os, pathlib, sys

notes = pathlib.Path(__file__).with_suffix(".json")
refused = pathlib.Path(__file__).with_suffix(".refused")
noted = {{"argv": sys.argv[1:], "environment": dict(os.environ), "asked": []}}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
        noted["asked"].append([self.path, json.loads(body or "null"), self.headers.get("authorization")])
        notes.write_text(json.dumps(noted))
        self.do_GET()

    def do_GET(self):
        metric, more = "vllm:generation_tokens_total", 3.0 * len(noted["asked"])
        text = f'{{metric}}{{{{model="p"}}}} 12.0\\n{{metric}}{{{{model="q"}}}} {{more}}\\n'.encode()
        self.send_response(500 if refused.exists() and refused.read_text() == self.path else 200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def options(tmp_path: Path) -> EngineOptions:
    """Returns options with the program in vLLM's place."""
    program = tmp_path / "vllm"
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    return EngineOptions(
        host="127.0.0.1",
        advertise_host="engines.internal",
        port=0,
        token=TOKEN,
        torch_threads=1,
        device="cpu",
        max_batch_size=1,
        log_folder=tmp_path / "logs",
        vllm_command=str(program),
        vllm_start_deadline_s=LIMIT_S,
    )


@pytest.fixture
def policy(tmp_path: Path) -> PublishedPolicy:
    return PublishedPolicy(name="resources/policy.p/versions/4", version=4, path=folder_of(tmp_path / "model"))


def folder_of(folder: Path) -> Path:
    folder.mkdir()
    save_file({"w": np.zeros(3, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def failing(options: EngineOptions, script: str) -> EngineOptions:
    Path(options.vllm_command).write_text(f"#!/bin/sh\n{script}\n")
    return options


async def started(
    options: EngineOptions, policy: PublishedPolicy, notify: Callable[[str, str], None] = lambda *_: None, **fields: Any
) -> tuple[VllmProcess, dict[str, Any]]:
    """Starts it; returns it and what the program was given."""
    process = await VllmProcess.start(options, policy, VllmEngine(kind="vllm", **fields), notify)
    return process, json.loads(Path(f"{options.vllm_command}.json").read_text())


async def test_it_is_given_the_settings_and_none_of_the_services_secrets(options, policy, monkeypatch):
    monkeypatch.setenv("FULMEN_ALGORITHM_TOKEN", "a token")
    told: list[str] = []
    process, noted = await started(
        options,
        policy,
        lambda _, text: told.append(text),
        dtype="bfloat16",
        max_model_len=512,
        tensor_parallel=2,
        enforce_eager=True,
        tool_call_parser="hermes",
        args={"max-num-batched-tokens": 99, "enable-prefix-caching": False, "disable-log-stats": True},
    )
    try:
        argv = noted["argv"]
        assert argv[:2] == ["serve", str(policy.path)]
        given = dict(zip(argv, [*argv[1:], ""], strict=True))
        wanted = {"served-model-name": "p", "dtype": "bfloat16", "max-model-len": "512", "tensor-parallel-size": "2"}
        wanted |= {"tool-call-parser": "hermes", "logprobs-mode": "processed_logprobs", "max-num-batched-tokens": "99"}
        assert wanted == {name: given[f"--{name}"] for name in wanted}
        assert {"--enforce-eager", "--no-enable-prefix-caching", "--disable-log-stats"} <= set(argv)
        assert "--disable-uvicorn-access-log" in argv, "a line for each call would fill the disk"
        assert not {"--enable-lora", "--gpu-memory-utilization"} & set(argv)
        environment = noted["environment"]
        assert not [name for name in environment if name.startswith("FULMEN_")]
        assert environment["VLLM_API_KEY"] == TOKEN
        assert TOKEN not in argv
        assert noted["asked"] == [["/update_weight_version", {"new_version": "4"}, f"Bearer {TOKEN}"]]
        assert process.address == EngineAddress(
            base_url=f"http://engines.internal:{given['--port']}/v1", kind=EngineKind.VLLM, key_name="engine"
        )
        assert await process.sampled_tokens() == 15
        assert told[0].startswith("vLLM is starting")
        assert told[-1].startswith("vLLM serves after")
    finally:
        await process.stop()
    assert await asyncio.wait_for(process.ended(), LIMIT_S) == 128 + 15
    assert not await process.healthy()


async def test_a_policy_of_adapters_is_served_as_adapters_beside_its_base_model(options, policy, tmp_path):
    adapters = {role: folder_of(tmp_path / role) for role in ("writer", "critic")}
    for rank, folder in zip((4, 20), adapters.values(), strict=True):
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    lora = replace(policy, kind=WeightsKind.LORA, path=tmp_path, base_model=policy.path, adapters=adapters)
    process, noted = await started(options, lora)
    await process.stop()
    argv = noted["argv"]
    assert argv[1] == str(policy.path)
    assert "--enable-lora" in argv
    assert (argv[argv.index("--max-lora-rank") + 1], argv[argv.index("--max-loras") + 1]) == ("32", "2")
    loaded = [body for path, body, _ in noted["asked"] if path == "/v1/load_lora_adapter"]
    assert [(body["lora_name"], body["lora_path"], body["load_inplace"]) for body in loaded] == [
        (f"p.{role}", str(folder), True) for role, folder in adapters.items()
    ]
    assert argv[argv.index("--served-model-name") + 1] == "p"
    alone = replace(lora, adapters={"default": adapters["critic"]})
    process, noted = await started(options, alone)
    await process.stop()
    assert noted["argv"][noted["argv"].index("--served-model-name") + 1] == "p.base"


class Gate:
    """Notes what is asked of the proxy, among what is asked of the program."""

    def __init__(self, program: str) -> None:
        self.asked: list[str] = []
        self.promoting = asyncio.Event()
        self.may_promote = asyncio.Event()
        self._notes = Path(f"{program}.json")

    def of_vllm(self) -> list[str]:
        """Returns the paths that the program was asked for since it started."""
        return [path for path, _, _ in json.loads(self._notes.read_text())["asked"]][1:]

    async def hold(self, ttl_s: float) -> None:
        self.asked.append(f"hold for {ttl_s:.0f} s after {len(self.of_vllm())} calls")

    async def idle(self, limit_s: float) -> bool:
        self.asked.append(f"idle within {limit_s:.0f} s after {len(self.of_vllm())} calls")
        return True

    async def promote(self) -> None:
        self.promoting.set()
        await self.may_promote.wait()
        self.asked.append(f"promote after {self.of_vllm()[-1]}")

    async def release(self) -> None:
        self.asked.append(f"release after {self.of_vllm()[-1]}")


SWAP = [
    "/pause?mode=keep&clear_cache=true",
    "/collective_rpc",
    "/reset_prefix_cache?reset_running_requests=true",
    "/update_weight_version",
    "/resume",
]


@pytest.mark.parametrize("mode", ["freeze", "drain"])
async def test_a_swap_pauses_loads_promotes_and_resumes(options, policy, mode):
    process, _ = await started(options, policy, swap=mode, drain_limit_s=20)
    gate = Gate(options.vllm_command)
    gate.may_promote.set()
    metrics = await process.swap(replace(policy, version=5), gate)
    await process.stop()
    assert gate.of_vllm() == SWAP
    around = (["hold for 80 s after 0 calls", "idle within 20 s after 0 calls"], ["release after /resume"])
    before, after = around if mode == "drain" else ([], [])
    assert gate.asked == [*before, "promote after /update_weight_version", *after]
    assert (metrics.pause_s > 0, metrics.size_bytes) == (True, (policy.path / "model.safetensors").stat().st_size)


async def test_a_cancelled_swap_completes_until_calls_resume(options, policy):
    process, _ = await started(options, policy)
    gate = Gate(options.vllm_command)
    swap = asyncio.create_task(process.swap(replace(policy, version=5), gate))
    await gate.promoting.wait()
    swap.cancel()
    gate.may_promote.set()
    with pytest.raises(asyncio.CancelledError):
        await swap
    await process.stop()
    assert gate.of_vllm() == SWAP


async def test_a_failed_swap_resumes_calls_if_there_are_weights(options, policy):
    process, _ = await started(options, policy)
    for number, refused in enumerate(SWAP):
        gate = Gate(options.vllm_command)
        gate.may_promote.set()
        before = len(gate.of_vllm())
        Path(f"{options.vllm_command}.refused").write_text(refused)
        with pytest.raises(EngineFailed, match="vLLM answered 500 to POST /"):
            await process.swap(replace(policy, version=5), gate)
        last = refused == "/resume"
        # One that neither takes weights nor goes back to the old ones has none: it would end at the next token.
        after = {"/resume": [], "/collective_rpc": ["/collective_rpc"]}.get(refused, ["/resume"])
        assert gate.of_vllm()[before:] == [*SWAP[: number + 1], *after]
        assert bool(gate.asked) == last
    await process.stop()


async def test_tokens_of_an_engine_of_others_count_from_when_it_is_attached_to(options, policy):
    process, noted = await started(options, policy)
    url = f"http://127.0.0.1:{noted['argv'][noted['argv'].index('--port') + 1]}/v1"
    external = ExternalEngine(kind="external", base_url=url)
    gate = Gate(options.vllm_command)
    gate.may_promote.set()
    naming = replace(options, external_keys={url: TOKEN})
    for _ in range(2):
        # What others were given, or the same policy before a swap that failed, is counted by nobody or elsewhere.
        engine = await ExternalVllm.attach(naming, policy, external, lambda *_: None, gate)
        assert await engine.sampled_tokens() == 0
        await engine.swap(replace(policy, version=5), gate)
        assert await engine.sampled_tokens() == 3 * len(SWAP)
    await process.stop()


async def test_one_that_ends_says_its_last_words(options, policy):
    with pytest.raises(EngineFailed, match=r"ended with status 3: (?s:.*)no such device"):
        await started(failing(options, "echo no such device >&2; exit 3"), policy)


async def test_one_that_takes_too_long_is_ended(options, policy):
    slow = failing(options, f"echo $$ > {options.vllm_command}.pid; echo still loading; exec sleep 600")
    pid = Path(f"{options.vllm_command}.pid")
    for deadline_s in (3.0, LIMIT_S):
        with pytest.raises(EngineFailed, match="did not start within ") as failed:
            await started(replace(slow, vllm_start_deadline_s=deadline_s), policy)
        # On a busy machine a program takes its time to come to its first line.
        if pid.exists():
            break
    assert "still loading" in str(failed.value)
    # The killed process is reaped by its guardian, a moment later.
    await settled(lambda: not alive(int(pid.read_text())))


async def test_one_that_is_not_there_is_named(options, policy):
    with pytest.raises(EngineFailed, match=r"ended with status 127: /nowhere/vllm: No such file or directory"):
        await started(replace(options, vllm_command="/nowhere/vllm"), policy)


async def test_weights_that_are_not_whole_start_nothing(options, policy):
    weights = policy.path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(EngineFailed, match="is truncated"):
        await started(options, policy)
    assert not options.log_folder.exists()
