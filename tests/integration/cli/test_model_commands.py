"""A model goes from a hub into a training: listed, exported with its card, merged, reproduced."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from transformers import AutoModelForCausalLM, AutoTokenizer

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.algorithm.v1 import training_run_service_pb2 as service_pb
from fulmen.algorithm.v1.training_run_service_pb2_grpc import TrainingRunServiceStub
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen_algorithm.weights.delta import DELTA_FILE, encode
from fulmen_algorithm.weights.tensor_files import read_folder
from fulmen_cli.exits import Exit
from fulmen_service_kit.security.tokens import Role
from tests.support.algorithm.hub import Hub, Repository, commit_of, running_hub
from tests.support.algorithm.models import small_model
from tests.support.algorithm.runs import FINAL_RUN_STATES, eventually
from tests.support.algorithm.sharded import sharded_model
from tests.support.service_kit.processes import serving_process
from tests.support.store.running import StoreHandle, Stubs

pytestmark = [pytest.mark.long(short=True), pytest.mark.timeout(300)]

NAME = "Acme/Tiny-Qwen3"
IN_PYTHON = """
import sys
import fulmen

with fulmen.Client() as client:
    folder = client.models.export(client.runs.get(sys.argv[1]).model(), sys.argv[2])
    try:
        client.models.export("policy.solver", folder)
    except fulmen.TransferFailed:
        print(client.models.push(folder, "acme/solver"))
"""
WITHOUT_AGENT = """
import sys
import fulmen

with fulmen.Client() as client:
    demonstration = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    run = client.train(
        algorithm=fulmen.SFT(steps=2, report_every=1), demonstrations=[demonstration], base=sys.argv[1], name="python"
    )
    print([step.number for step in run])
"""
SFT = """
name = "alone"
[policy]
name = "alone"
base = "hf:{base}"
[data]
demonstrations = "demonstrations.jsonl"
[[stage]]
algorithm = "sft"
steps = 2
batch_size = 2
report_every = 1
"""
Fulmen = Callable[..., Awaitable[Result]]


@dataclass(frozen=True, kw_only=True)
class World:
    """A store, an algorithm service and a hub."""

    hub: Hub
    store: StoreHandle
    address: str
    demonstrations: str

    async def trained(self, name: str, **settings: object) -> pb.TrainingRun:
        """Trains a policy that begins with the hub's model; returns its ended run."""
        run = pb.TrainingRun(
            name=f"projects/default/trainingRuns/{name}",
            algorithm="sft",
            settings_json=json.dumps({"steps": 2, "batch_size": 2, "report_every": 1, **settings}),
            policy=pb.PolicySpec(name=name, base=f"hf:{NAME}"),
            inputs={"demonstrations": self.demonstrations},
        )
        async with open_channel(self.address, token=self.store.token(Role.CLIENT)) as channel:
            runs = TrainingRunServiceStub(channel)
            await runs.CreateTrainingRun(service_pb.CreateTrainingRunRequest(training_run=run))

            async def ended() -> pb.TrainingRun | None:
                found = (await runs.GetTrainingRun(service_pb.GetTrainingRunRequest(name=run.name))).training_run
                return found if found.state in FINAL_RUN_STATES else None

            done = await eventually(ended, what=f"{name} ends")
        assert done.state == pb.TRAINING_RUN_STATE_SUCCEEDED, done.failure_message
        return done

    async def in_python(self, program: str, *arguments: str | Path) -> str:
        """Runs a program with the services of this world; returns what it printed."""
        environment = {
            "FULMEN_STORE_TARGET": self.store.target, "FULMEN_LLM_PROXY_TARGET": "127.0.0.1:1",
            "FULMEN_TOKEN": self.store.token(Role.CLIENT), "HF_TOKEN": self.hub.token, "HF_HUB_DISABLE_XET": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", program, *arguments]
        # The store runs in this process.
        done = await asyncio.to_thread(
            subprocess.run, command, env=os.environ | environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
async def world(store: StoreHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    line = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    dataset = resource_pb2.ResourceVersion(
        name="resources/dataset.one", kind="dataset", content=json.dumps(line).encode()
    )
    stubs = await store.stubs()
    request = resource_service_pb2.PublishResourcesRequest(resources=[dataset])
    (published,) = (await stubs.resources.PublishResources(request)).resources
    with running_hub() as hub:
        base = small_model(tmp_path / "base", hidden=16, layers=1)
        hub.repositories[NAME] = Repository.of(sharded_model(tmp_path / "sharded", base))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        values = {
            "token": store.token(Role.SERVICE, project="projects/*"),
            "port": 0,
            "metrics_port": 0,
            "state_dir": tmp_path / "state",
            "store_target": store.target,
            "llm_proxy_target": "127.0.0.1:1",
            "hub_models": "Acme/*",
        }
        async with serving_process("fulmen_algorithm", values, trains=True) as service:
            address = f"127.0.0.1:{service.port}"
            monkeypatch.setenv("FULMEN_ALGORITHM_TARGET", address)
            yield World(hub=hub, store=store, address=address, demonstrations=published.name)


def documents(result: Result) -> list[Any]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())


async def test_a_model_of_a_hub_is_trained_listed_exported_and_reproduced(
    world: World, fulmen: Fulmen, tmp_path: Path
) -> None:
    run = await world.trained("solver")
    base = f"hf:{NAME}@{commit_of('main')}"
    assert run.provenance["policy.base"] == base

    (listed,) = json.loads((await fulmen("model", "list", "-o", "json")).stdout)
    assert (listed["name"], listed["base"], listed["run"]) == (run.policy_version, base, run.name)
    assert listed["weights_bytes"] > 0
    table = (await fulmen("model", "list", "solver")).stdout
    assert "solver@" in table
    assert base in table

    out = tmp_path / "out" / "solver"
    await fulmen("model", "export", "solver", out)
    assert weights(out).keys() == weights(Path(run.model_path)).keys()
    assert AutoTokenizer.from_pretrained(out).chat_template
    card = (out / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"base_model: {NAME}\n" in card
    assert all(text in card for text in (run.policy_version.rpartition("/")[2], "sft", base, "## Report"))
    await fulmen("model", "export", "solver", out, status=Exit.CONFLICT)
    await fulmen("model", "export", "unknown", tmp_path / "none", status=Exit.NOT_FOUND)
    assert not (tmp_path / "none").exists()
    assert [path.name for path in out.parent.iterdir()] == ["solver"]

    python = tmp_path / "python"
    printed = await world.in_python(IN_PYTHON, run.name, python)
    assert f"{world.hub.url}/acme/solver/commit/" in printed
    files = {path.name: path.read_bytes() for path in python.iterdir()}
    assert files == {path.name: path.read_bytes() for path in out.iterdir()}
    assert world.hub.repositories["acme/solver"].commits[commit_of("main")] == files
    assert world.hub.private == {"acme/solver"}

    world.hub.repositories[NAME].commits[commit_of("later")] = world.hub.repositories[NAME].commits[commit_of("main")]
    world.hub.repositories[NAME].refs["main"] = commit_of("later")
    *events, again = documents(await fulmen("run", "reproduce", "solver", "--exact", "-o", "json"))
    assert [event["step"]["step"] for event in events if "step" in event] == ["1", "2"]
    assert [run["provenance"]["policy.base"] for run in again["runs"]] == [base, base]


async def test_conversations_alone_are_imitated_without_an_agent_and_every_event_is_a_line_of_json(
    world: World, store: StoreHandle, fulmen: Fulmen, tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    line = {"messages": [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]}
    (folder / "demonstrations.jsonl").write_text(f"{json.dumps(line)}\n")
    (folder / "train.toml").write_text(SFT.format(base=NAME))
    # No bundle is made: what could not be in one does not matter.
    (folder / "notes.txt").write_text("-----BEGIN RSA PRIVATE KEY-----\n")

    done = await fulmen("train", folder / "train.toml", "-o", "json", "--report-dir", tmp_path / "report")
    *events, summary = documents(done)
    assert [event["step"]["step"] for event in events if "step" in event] == ["1", "2"]
    states = [event["run"]["state"].rpartition("_")[2] for event in events if "run" in event]
    assert (states[0], states[-1]) == ("PENDING", "SUCCEEDED")
    assert summary == json.loads((tmp_path / "report" / "summary.json").read_text())
    assert [run["algorithm"] for run in summary["training_runs"]] == ["sft"]

    assert await world.in_python(WITHOUT_AGENT, f"hf:{NAME}") == "[1, 2]\n"
    kinds = {each["kind"] for each in json.loads((await fulmen("resources", "list", "-o", "json")).stdout)}
    assert kinds == {"dataset", "policy"}


async def test_a_version_that_is_a_difference_is_put_together(stubs: Stubs, fulmen: Fulmen, tmp_path: Path) -> None:
    folders = [small_model(tmp_path / str(seed), seed, hidden=16, layers=1) for seed in (1, 2)]
    first, second = (read_folder(folder) for folder in folders)
    (tmp_path / "delta").mkdir()
    encode(first, second, tmp_path / "delta" / DELTA_FILE)
    base = await published(stubs, {"kind": "full", "path": str(folders[0]), "sha256": first.sha256()})
    difference = {"kind": "delta", "path": str(tmp_path / "delta"), "sha256": second.sha256(), "base": base, "step": 2}
    await published(stubs, difference)

    await fulmen("model", "export", "made@2", tmp_path / "out")
    assert read_folder(tmp_path / "out").sha256() == second.sha256()
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert "| version | made@2 |" in (tmp_path / "out" / "README.md").read_text()


async def published(stubs: Stubs, description: dict[str, object]) -> str:
    version = resource_pb2.ResourceVersion(
        name="resources/policy.made", kind="policy", content=json.dumps(description).encode()
    )
    request = resource_service_pb2.PublishResourcesRequest(resources=[version])
    return str((await stubs.resources.PublishResources(request)).resources[0].name)


async def test_adapters_are_merged_as_the_trainer_merges_them(world: World, fulmen: Fulmen, tmp_path: Path) -> None:
    adapted = await world.trained("adapted", lora={"rank": 2, "alpha": 64.0}, learning_rate=0.1)
    await fulmen("model", "merge-lora", "adapted", tmp_path / "merged")
    merged, whole = weights(tmp_path / "merged"), weights(Path(adapted.model_path))
    assert merged.keys() == whole.keys()
    assert all(torch.allclose(merged[name], whole[name], atol=1e-5) for name in whole)
    base = weights(tmp_path / "sharded")
    assert any(not torch.allclose(merged[name], base[name], atol=1e-3) for name in whole)

    await fulmen("model", "export", "adapted", tmp_path / "exported")
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(tmp_path / "exported").items())
    await fulmen("model", "merge-lora", "adapted", tmp_path / "none", "--adapter", "other", status=Exit.USAGE)


async def test_weights_on_another_machine_are_named_and_nothing_is_written(
    world: World, fulmen: Fulmen, tmp_path: Path
) -> None:
    run = await world.trained("away")
    shutil.rmtree(run.model_path)
    refused = await fulmen("model", "export", "away", tmp_path / "away", status=Exit.FAILED)
    assert "are not on this machine" in refused.output
    assert not (tmp_path / "away").exists()
