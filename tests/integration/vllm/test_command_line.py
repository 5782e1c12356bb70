"""What Fulmen asks of a vLLM over several machines is read as it is meant by the parser of the vLLM that is installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from fulmen_algorithm.engines.engine import EngineOptions
from fulmen_algorithm.engines.vllm import command_line
from fulmen_algorithm.policy.engine_settings import VllmEngine
from fulmen_algorithm.runs.ports import PublishedPolicy
from tests.support.algorithm.vllm import ENVIRONMENT, require_vllm

PROGRAM = Path(__file__).parents[2] / "support/algorithm/vllm_command_line.py"
LIMIT_S = 400.0

pytestmark = [pytest.mark.long(short=True), pytest.mark.timeout(900)]


def parsed(*words: str) -> subprocess.CompletedProcess[str]:
    # Without this environment's modules, and without the folder of the program.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(ENVIRONMENT / "bin/python"), "-P", str(PROGRAM), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def words_of(engine: VllmEngine, model: Path) -> list[str]:
    options = EngineOptions(
        host="10.0.0.7", advertise_host="10.0.0.7", port=0, token="", torch_threads=1, device="cuda", max_batch_size=1
    )
    policy = PublishedPolicy(name="resources/policy.mine/versions/1", version=1, path=model)
    return command_line(options, policy, engine, model, 8123, as_adapters=False)[1:]


def test_an_engine_over_machines_is_split_by_layers_over_them_and_by_tensors_inside_each(tmp_path):
    require_vllm()
    engine = VllmEngine(kind="vllm", cluster="ray", nodes=2, tensor_parallel=8, args={"max-num-batched-tokens": 8192})
    done = parsed(*words_of(engine, tmp_path))
    assert done.returncode == 0, done.stderr
    read = json.loads(done.stdout.splitlines()[-1])
    wanted = {
        "model_tag": str(tmp_path),
        "tensor_parallel_size": 8,
        "pipeline_parallel_size": 2,
        "distributed_executor_backend": "ray",
        "gpu_memory_utilization": 0.5,
        "host": "10.0.0.7",
        "port": 8123,
        "max_num_batched_tokens": 8192,
        "logprobs_mode": "processed_logprobs",
    }
    assert wanted.items() <= read.items()


def test_an_engine_of_one_machine_is_left_to_vllms_own_choice():
    words = words_of(VllmEngine(kind="vllm", tensor_parallel=8), Path("/model"))
    assert "--distributed-executor-backend" not in words
    assert "--pipeline-parallel-size" not in words


def test_an_engine_that_reports_experts_is_asked_to_by_a_flag_that_vllm_has(tmp_path):
    require_vllm()
    done = parsed(*words_of(VllmEngine(kind="vllm", router_replay=True), tmp_path))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["enable_return_routed_experts"] is True
    assert "--enable-return-routed-experts" not in words_of(VllmEngine(kind="vllm"), tmp_path)


def test_a_flag_that_vllm_does_not_have_is_noticed(tmp_path):
    require_vllm()
    done = parsed("serve", str(tmp_path), "--pipeline-parallel-sizes", "2")
    assert done.returncode == 2
    assert "unrecognized arguments" in done.stderr
