"""The service by itself: refusals over gRPC, the state folder, the command line."""

import asyncio
import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceStub
from fulmen.errors import (
    PageTokenInvalid,
    PermissionDenied,
    SettingsInvalid,
    TokenInvalid,
    TrainingRunNotFound,
)
from fulmen.rpc.channel import open_channel
from fulmen_cli.exits import Exit
from fulmen_cli.main import app
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.algorithm import fake_slurm
from tests.support.algorithm.service_process import KEY, MODULE, START_LIMIT_S, TOKEN, environment, serving_at
from tests.support.cli.command_runner import CliRunner
from tests.support.service_kit.key_store import KeyService, serving_keys

LISTED = service_pb.ListAlgorithmsRequest()
# The schema of one algorithm takes up to 90 kB.
MAX_DESCRIPTIONS_BYTES = 150_000


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """Runs the service; yields its process and its address."""
    async with serving(tmp_path) as served:
        yield served


@asynccontextmanager
async def serving(state_dir: Path, **more: str) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """Runs a service with further settings; yields its process and its address."""
    async with serving_keys(KeyService(KEY)) as store, serving_at(state_dir, store, **more) as served:
        yield served


def run_once(command: str, settings: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MODULE, command], env=settings, capture_output=True, text=True, timeout=START_LIMIT_S, check=False
    )


def stub(channel: object) -> TrainingRunServiceStub:
    return TrainingRunServiceStub(channel)


STAGES = """
name = "tool"
[policy]
name = "tool"
build = "agent.py:build"
[agent]
python = "agent.py:solve"
[data]
train = "tasks.jsonl"
demonstrations = "conversations.jsonl"
[[stage]]
algorithm = "sft"
[[stage]]
algorithm = "grpo"
kl = {kind = "loss"}
parallel = {kind = "ddp", ranks = RANKS, reference_gpus = "own"}
"""


async def test_a_check_shows_the_gpus_of_each_stage_or_every_reason_why_they_do_not_fit(tmp_path, monkeypatch):
    lists = tmp_path / "nvidia-smi"
    lists.write_text("#!/bin/sh\nfor n in 0 1 2 3 4; do echo $n, GPU-$n, NVIDIA H100, 81920; done\n")
    lists.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "agent.py").write_text("def solve(task): return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text('{"input": "hello"}\n')
    (tmp_path / "conversations.jsonl").write_text('{"messages": [{"role": "assistant", "content": "hello"}]}\n')
    token = TokenSigner(KEY).issue(Role.CLIENT, subject="test", ttl_s=600)
    async with serving(tmp_path / "state", DEVICE="cuda") as (_, target):

        async def checked(ranks: int, *, status: Exit) -> str:
            (tmp_path / "train.toml").write_text(STAGES.replace("RANKS", str(ranks)))
            words = ["train", str(tmp_path / "train.toml"), "--check", "--algorithm-target", target, "--token", token]
            done = await asyncio.to_thread(CliRunner().invoke, app, words, env={"COLUMNS": "200", "TERM": "dumb"})
            assert done.exit_code == status, done.output
            return done.output

        shown = await checked(2, status=Exit.OK)
        assert "stage 1 (sft): GPUs (5 x NVIDIA H100, 80 GiB): the trainer on 0; the engine on 1." in shown
        assert (
            "stage 2 (grpo): GPUs (5 x NVIDIA H100, 80 GiB): the trainer's 2 ranks on 0-1; the 2 copies of the reference"
            " on 2-3; the engine on 4."
        ) in shown
        assert shown.count("Expected time: not known: no run of this model with these settings was measured here.") == 2
        refused = " ".join((await checked(4, status=Exit.USAGE)).split())
        assert "stage 2 (grpo): the trainer's 4 ranks and the 4 copies of the reference: 8 GPUs are needed" in refused


ON_CLUSTERS = (
    STAGES.partition("[[stage]]")[0]
    + """
[[stage]]
algorithm = "grpo"
parallel = {kind = "ddp", ranks = RANKS, cluster = "CLUSTER", cpus = 1}
engine = {kind = "embedded", replicas = REPLICAS, cluster = "hpc", gpus = GPUS}
"""
)


async def test_a_check_asks_clusters_what_they_have_and_says_which_it_could_not_ask(tmp_path, monkeypatch):
    for name, value in fake_slurm.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "agent.py").write_text("def solve(task): return 1.0\n")
    (tmp_path / "tasks.jsonl").write_text('{"input": "hello"}\n')
    (tmp_path / "conversations.jsonl").write_text('{"messages": [{"role": "assistant", "content": "hello"}]}\n')
    token = TokenSigner(KEY).issue(Role.CLIENT, subject="test", ttl_s=600)
    slurm = {"kind": "slurm", "folder": str(tmp_path)}
    clusters = json.dumps({"hpc": slurm, "machines": {"kind": "joined"}})
    async with serving(tmp_path / "state", CLUSTERS=clusters) as (_, target):

        async def checked(*, status: Exit, **words: object) -> str:
            text = ON_CLUSTERS
            for word, value in words.items():
                text = text.replace(word, str(value))
            (tmp_path / "train.toml").write_text(text)
            command = ["train", str(tmp_path / "train.toml"), "--check", "--algorithm-target", target, "--token", token]
            done = await asyncio.to_thread(CliRunner().invoke, app, command, env={"COLUMNS": "200", "TERM": "dumb"})
            assert done.exit_code == status, done.output
            return " ".join(done.output.split())

        shown = await checked(RANKS=2, CLUSTER="hpc", REPLICAS=1, GPUS=1, status=Exit.OK)
        placed = "Placement of ranks and engines on cluster 'hpc': 2 processes: 2 on node-a; 1 process: 1 on node-b."
        assert placed in shown
        # Everything that does not fit is told at once.
        refused = await checked(RANKS=9, CLUSTER="hpc", REPLICAS=1, GPUS=3, status=Exit.USAGE)
        assert "9 processes ask for 9 CPUs, but the nodes have 4 together" in refused
        assert "a process asks for 3 GPUs, but the largest node has 2" in refused
        shown = await checked(RANKS=2, CLUSTER="machines", REPLICAS=1, GPUS=1, status=Exit.OK)
        assert "Machines of cluster 'machines' join a run once it is created, so placement was not planned." in shown
        assert "Placement of engines on cluster 'hpc': 1 process: 1 on node-b." in shown
        (tmp_path / "slurm-bin/sinfo").write_text("#!/bin/sh\necho Unable to contact slurm controller >&2; exit 1\n")
        shown = await checked(RANKS=2, CLUSTER="hpc", REPLICAS=1, GPUS=1, status=Exit.OK)
        assert "Placement on cluster 'hpc' was not planned: Cluster 'hpc' does not answer: sinfo" in shown
        assert "Unable to contact slurm controller" in shown


async def test_the_service_refuses_clearly_and_ends_well(service, tmp_path):
    process, target = service
    signer = TokenSigner(KEY)
    token = signer.issue(Role.CLIENT, subject="test", ttl_s=600)
    async with open_channel(target, token=token) as channel:
        runs = stub(channel)
        offered = (await runs.ListAlgorithms(service_pb.ListAlgorithmsRequest())).algorithms
        assert {"grpo", "sft"} <= {each.name for each in offered}
        undescribed = [f"{a.name}.{s.name}" for a in offered for s in a.settings if not s.summary]
        assert not undescribed
        assert not any(each.settings_schema_json for each in offered)
        [whole] = (await runs.ListAlgorithms(service_pb.ListAlgorithmsRequest(algorithm="grpo"))).algorithms
        assert "group_size" in json.loads(whole.settings_schema_json)["properties"]
        assert not (await runs.ListAlgorithms(service_pb.ListAlgorithmsRequest(algorithm="none"))).algorithms
        draft = pb.TrainingRun(
            algorithm="sft", settings_json='{"stesp": 1, "steps": -1}', policy=pb.PolicySpec(name="p")
        )
        draft.policy.path = "/nowhere"
        with pytest.raises(SettingsInvalid) as refused:
            await runs.CreateTrainingRun(service_pb.CreateTrainingRunRequest(training_run=draft))
        fields = {violation.field for violation in refused.value.violations}
        assert fields == {"settings.stesp", "settings.steps", "inputs.demonstrations", "policy.path"}
        with pytest.raises(TrainingRunNotFound):
            await runs.GetTrainingRun(service_pb.GetTrainingRunRequest(name="projects/default/trainingRuns/none"))
        with pytest.raises(TrainingRunNotFound):
            await runs.RollbackTrainingRun(
                service_pb.RollbackTrainingRunRequest(checkpoint="projects/default/trainingRuns/none/x")
            )
        with pytest.raises(PageTokenInvalid):
            await runs.ListTrainingRuns(service_pb.ListTrainingRunsRequest(page_token="x"))
        with pytest.raises(PermissionDenied):
            await runs.ListTrainingRuns(service_pb.ListTrainingRunsRequest(project="projects/other"))
        assert not (await runs.ListTrainingRuns(service_pb.ListTrainingRunsRequest())).training_runs
    async with open_channel(target) as channel:
        with pytest.raises(TokenInvalid):
            await stub(channel).ListTrainingRuns(service_pb.ListTrainingRunsRequest())
    second = await asyncio.to_thread(run_once, "serve", environment(tmp_path))
    assert second.returncode == 1
    assert "Another process uses" in second.stderr
    process.terminate()
    assert process.wait(timeout=START_LIMIT_S) == 0


async def test_descriptions_of_algorithms_are_small_and_hold_nobody_up(tmp_path):
    async with serving_keys(KeyService(KEY)) as store:
        settings = environment(tmp_path, STORE_TARGET=store, LOOP_PROBE_INTERVAL_S="0.005")
        process = subprocess.Popen(
            [*MODULE, "serve"], env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            line = await asyncio.to_thread(lambda: next(text for text in process.stdout if '"serving"' in text))
            token = TokenSigner(KEY).issue(Role.READER, subject="test", ttl_s=600)
            async with open_channel(f"127.0.0.1:{json.loads(line)['port']}", token=token) as channel:
                names = ["", *(each.name for each in (await stub(channel).ListAlgorithms(LISTED)).algorithms)]
                requests = [service_pb.ListAlgorithmsRequest(algorithm=name) for name in names for _ in range(10)]
                answers = await asyncio.gather(*map(stub(channel).ListAlgorithms, requests))
        finally:
            process.terminate()
            output, _ = await asyncio.to_thread(process.communicate, timeout=START_LIMIT_S)

    assert max(answer.ByteSize() for answer in answers) < MAX_DESCRIPTIONS_BYTES
    events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    blocks = [event for event in events if event["event"] == "loop_blocked"]
    assert not [block for block in blocks if block["place"].startswith("fulmen_algorithm.")], blocks


def test_an_unknown_setting_is_an_error_and_secrets_are_masked(tmp_path):
    bad = run_once("config", environment(tmp_path, STORE_TRAGET="x", ENGINE_HOST="0.0.0.0"))
    assert bad.returncode == 2
    assert "FULMEN_ALGORITHM_STORE_TRAGET: no such setting" in bad.stderr
    assert "engine_token is required" in bad.stderr
    good = run_once("config", environment(tmp_path))
    assert good.returncode == 0
    assert TOKEN not in good.stdout
