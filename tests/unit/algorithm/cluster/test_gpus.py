"""The GPUs of a machine: which are seen, who gets which, and what a started process is shown."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from fulmen.errors import SettingsInvalid
from fulmen_algorithm.algorithms.registry import load_registry
from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.cluster.gpus.machine import Gpu, NvidiaSmi, seen, shown_to
from fulmen_algorithm.cluster.gpus.runs import GpuPlacement, RunGpus, Served
from fulmen_algorithm.cluster.local import LocalCluster
from fulmen_algorithm.cluster.port import PlacementRefused, Wishes
from fulmen_algorithm.engines import process
from fulmen_algorithm.engines.engine import EngineFailed, EngineOptions
from fulmen_algorithm.engines.starter import EngineStarter
from fulmen_algorithm.policy.engine_settings import EmbeddedEngine, VllmEngine, each_engine
from fulmen_algorithm.runs.algorithm import RunSettings
from fulmen_algorithm.runs.creation.rules import parse_settings
from fulmen_algorithm.runs.ports import PublishedPolicy
from fulmen_algorithm.trainers.devices import Devices
from fulmen_algorithm.trainers.processes import GroupOptions, group_order
from fulmen_algorithm.trainers.rank_group import wishes_of
from fulmen_algorithm.training.compute import shown_gpus
from fulmen_algorithm.weight_agent.agent import RemoteGate
from tests.support.algorithm import shows_devices
from tests.support.algorithm.clusters import ENVIRONMENT, PROCESS, Calls

REGISTRY = load_registry()
LISTING = "0, GPU-aaaa, NVIDIA H100, 81559\n1, GPU-bbbb, NVIDIA H100, 81559\n2, GPU-cccc, NVIDIA L4, 23034\n"


def settings_of(algorithm: str = "grpo", **settings: object) -> RunSettings:
    return parse_settings(REGISTRY[algorithm], json.dumps(settings))


class Machine:
    """A `GpuProbe` of a machine with so many GPUs, and the GPUs that runs hold."""

    def __init__(self, count: int, *, device: str = "cuda") -> None:
        self.count = count
        self.runs = RunGpus(self, device=device)

    async def gpus(self) -> Mapping[int, Gpu]:
        return {number: Gpu(name="NVIDIA H100", memory_bytes=80 * 2**30) for number in range(self.count)}

    def place(self, run: str = "run", *, served: Served | None = None, trains: bool = True, **settings: object):
        placed = self.runs.place(run, settings_of(**settings), trains=trains, served=served or Served())
        return asyncio.run(placed)


def gpus_of(placed: GpuPlacement) -> tuple[list[int], list[list[int]]]:
    """Returns the GPUs of the trainer, and of each engine."""
    return placed.settings.parallel.gpus, [each.gpus for each in each_engine(placed.settings.engine)]


def vllm(**settings: object) -> dict[str, object]:
    return {"kind": "vllm", **settings}


def test_trainer_and_engines_have_gpus_of_their_own_where_there_are_enough():
    placed = Machine(8).place(parallel={"kind": "fsdp2", "ranks": 4}, engine=vllm(replicas=2, tensor_parallel=2))
    assert gpus_of(placed) == ([0, 1, 2, 3], [[4, 5], [6, 7]])
    assert placed.sharing == ""
    assert placed.text == (
        "GPUs (8 x NVIDIA H100, 80 GiB): the trainer's 4 ranks on 0-3; engine 0 on 4-5; engine 1 on 6-7."
    )


def test_they_share_with_a_notice_where_there_are_not():
    placed = Machine(1).place(engine=vllm())
    assert gpus_of(placed) == ([0], [[0]])
    assert placed.sharing == ("There are not enough GPUs, so some are shared: 0 by the trainer, the engine.")


def test_a_run_may_name_the_gpus_of_its_trainer_and_its_engines():
    placed = Machine(8).place(
        parallel={"kind": "ddp", "ranks": 2, "gpus": [6, 7]}, engine=vllm(replicas=2, gpus=[0, 1, 2, 3])
    )
    assert gpus_of(placed) == ([6, 7], [[0, 1], [2, 3]])


def test_the_models_beside_the_policy_are_told_with_the_trainer():
    placed = Machine(2).place(algorithm="ppo", kl={"kind": "loss"})
    assert "the trainer with reference and critic on 0" in placed.text


def test_models_beside_the_policy_have_gpus_of_their_own_where_a_run_asks_for_them():
    parallel = {"kind": "ddp", "ranks": 2, "reference_gpus": "own", "critic_gpus": "own"}
    placed = Machine(8).place(algorithm="ppo", kl={"kind": "loss"}, parallel=parallel, engine=vllm())
    assert placed.text == (
        "GPUs (8 x NVIDIA H100, 80 GiB): the trainer's 2 ranks on 0-1; the 2 copies of the reference on 2-3; the 2 copies of"
        " the critic on 4-5; the engine on 6."
    )
    found = placed.settings.parallel
    assert (found.gpus, found.reference_gpus, found.critic_gpus) == ([0, 1], [2, 3], [4, 5])
    assert placed.settings.engine.gpus == [6]


def test_a_model_beside_the_policy_takes_the_gpus_that_the_run_names():
    placed = Machine(4).place(kl={"kind": "loss"}, parallel={"kind": "none", "reference_gpus": [0]})
    found = placed.settings.parallel
    assert (found.gpus, found.reference_gpus, placed.settings.engine.gpus) == ([1], [0], [2])


def test_where_gpus_are_short_an_engine_shares_one_and_models_of_a_process_never_do():
    placed = Machine(2).place(kl={"kind": "loss"}, parallel={"kind": "none", "reference_gpus": "own"})
    assert (placed.settings.parallel.gpus, placed.settings.parallel.reference_gpus) == ([0], [1])
    assert placed.sharing == "There are not enough GPUs, so some are shared: 0 by the trainer, the engine."
    with pytest.raises(PlacementRefused) as refused:
        Machine(3).place(
            kl={"kind": "loss"},
            parallel={"kind": "ddp", "ranks": 2, "reference_gpus": "own"},
            engine=vllm(tensor_parallel=4),
        )
    assert refused.value.reasons == (
        "the engine: 4 GPUs are needed, but there are 3",
        "the trainer's 2 ranks and the 2 copies of the reference: 4 GPUs are needed, but there are 3",
    )


def test_ranks_see_the_gpus_of_all_their_models_and_each_takes_those_of_its_place():
    parallel = {"kind": "ddp", "ranks": 2, "gpus": [6, 7], "reference_gpus": [2, 3], "critic_gpus": [0, 1]}
    asked = settings_of("ppo", kl={"kind": "loss"}, parallel=parallel).parallel
    assert shown_gpus(asked) == [6, 7, 2, 3, 0, 1]
    assert Devices.of_rank(asked, 1, 2) == Devices(policy="cuda:1", reference="cuda:3", critic="cuda:5")
    only_critic = settings_of("ppo", kl={"kind": "loss"}, parallel={"kind": "ddp", "critic_gpus": "own"}).parallel
    assert Devices.of_rank(only_critic, 0, 1) == Devices(policy="cuda:0", reference="cuda:0", critic="cuda:1")


def test_the_services_own_process_takes_the_gpus_of_the_plan():
    alone = {"kind": "none", "reference_gpus": "own"}
    found = Machine(4).place(algorithm="ppo", kl={"kind": "loss"}, parallel=alone).settings.parallel
    assert Devices.of_service(found, "cuda") == Devices(policy="cuda:0", reference="cuda:1", critic="cuda:0")
    unplaced = settings_of().parallel
    assert Devices.of_service(unplaced, "cpu") == Devices.all_on("cpu")


def test_a_rank_on_a_cluster_asks_for_a_gpu_more_for_each_model_with_its_own():
    parallel = {"kind": "ddp", "ranks": 8, "cluster": "ray", "reference_gpus": "own", "critic_gpus": "own"}
    settings = settings_of("ppo", kl={"kind": "loss"}, parallel=parallel)
    assert wishes_of(settings.compute, GroupOptions(device="cuda")).each.gpus == 3
    assert asyncio.run(Machine(1).runs.plan(settings, True)).problems == ()
    assert asyncio.run(Machine(0, device="cpu").runs.plan(settings, True)).problems == (
        "the reference: GPUs of its own are requested, but the GPUs of this machine are not used (FULMEN_ALGORITHM_DEVICE)",
        "the critic: GPUs of its own are requested, but the GPUs of this machine are not used (FULMEN_ALGORITHM_DEVICE)",
    )


def test_what_is_named_is_left_to_who_names_it():
    assert gpus_of(Machine(3).place(engine=vllm(replicas=2, gpus=[0, 1]))) == ([2], [[0], [1]])


def test_what_does_not_fit_is_refused_with_every_reason():
    with pytest.raises(PlacementRefused) as refused:
        Machine(2).place(parallel={"kind": "ddp", "ranks": 4}, engine=vllm(replicas=2, gpus=[0, 0, 9, 1]))
    assert refused.value.reasons == (
        "the trainer's 4 ranks: 4 GPUs are needed, but there are 2",
        "engine 0: GPU 0 is named twice, but two of its processes cannot share one",
        "engine 1: GPU 9 is named, but the GPUs are 0-1",
    )


def test_a_run_that_never_fits_is_known_before_it_is_created():
    machine = Machine(2)
    machine.place("first", engine=vllm())
    fits = asyncio.run(machine.runs.plan(settings_of(engine=vllm()), True))
    assert (fits.text, fits.problems) == ("GPUs (2 x NVIDIA H100, 80 GiB): the trainer on 0; the engine on 1.", ())
    wide = asyncio.run(machine.runs.plan(settings_of(engine=vllm(tensor_parallel=4)), True))
    assert (wide.text, wide.problems) == ("", ("the engine: 4 GPUs are needed, but there are 2",))


def test_a_plan_says_what_is_shared_and_when_no_gpus_are_needed_or_used():
    tight = asyncio.run(Machine(1).runs.plan(settings_of(engine=vllm()), True))
    assert tight.text.endswith("so some are shared: 0 by the trainer, the engine.")
    elsewhere = settings_of(parallel={"kind": "ddp", "cluster": "ray"}, engine=vllm(cluster="ray"))
    assert asyncio.run(Machine(1).runs.plan(elsewhere, True)).text == "No GPUs of the service's machine are needed."
    on_cpus = asyncio.run(Machine(0, device="cpu").runs.plan(settings_of(), True))
    assert on_cpus.text == "No GPUs are used (FULMEN_ALGORITHM_DEVICE)."


def test_engines_that_fill_a_gpu_cannot_share_it_with_a_trainer():
    with pytest.raises(PlacementRefused) as refused:
        Machine(2).place(engine=vllm(replicas=2, gpu_memory_utilization=1.0))
    assert refused.value.reasons == (
        "GPU 0 is for the trainer, engine 1 (1), which together need more than its memory: name other GPUs, or"
        " lower gpu_memory_utilization",
    )


def test_gpus_of_other_active_runs_are_left_to_them_until_they_end():
    machine = Machine(4)
    assert gpus_of(machine.place("first", engine=vllm())) == ([0], [[1]])
    assert gpus_of(machine.place("second", engine=vllm())) == ([2], [[3]])
    third = machine.place("third", engine=vllm(gpu_memory_utilization=0.3))
    assert gpus_of(third) == ([0], [[1]])
    assert "1 by the engine, the engine of first" in third.sharing
    machine.runs.release("third")
    machine.runs.release("second")
    assert gpus_of(machine.place("fourth", engine=vllm())) == ([2], [[3]])


def test_engines_of_ended_runs_make_room_where_there_is_not_enough_for_both():
    idle = {"old": VllmEngine(kind="vllm", gpus=[1], gpu_memory_utilization=0.9)}
    wide = Machine(3).place(engine=vllm(gpu_memory_utilization=0.9), served=Served(idle=idle))
    assert (gpus_of(wide), wide.crowded) == (([0], [[2]]), [])
    tight = Machine(2).place(engine=vllm(gpu_memory_utilization=0.9), served=Served(idle=idle))
    assert (gpus_of(tight), tight.crowded) == (([0], [[1]]), ["old"])


def test_engines_keep_their_gpus_when_a_run_resumes():
    placed = Machine(4).place(
        engine=vllm(replicas=2), served=Served(own=VllmEngine(kind="vllm", replicas=2, gpus=[0, 1]))
    )
    assert gpus_of(placed) == ([2], [[0], [1]])


def test_a_run_that_trains_nothing_needs_gpus_for_its_engines_alone():
    placed = Machine(2).place(algorithm="evaluate", trains=False, engine=vllm(tensor_parallel=2))
    assert placed.settings.engine.gpus == [0, 1]


def test_engines_and_ranks_on_a_cluster_need_none_of_this_machine():
    engine = vllm(cluster="ray", gpus=2)
    placed = Machine(1).place(parallel={"kind": "ddp", "ranks": 8, "cluster": "ray"}, engine=engine)
    assert (placed.text, placed.settings.engine.gpus, placed.settings.parallel.gpus) == ("", 2, None)


def test_without_gpus_a_run_that_names_some_is_refused_and_others_are_left_alone():
    assert Machine(0, device="cpu").place(engine=vllm()).settings == settings_of(engine=vllm())
    assert "are unknown" in Machine(0).place().text
    with pytest.raises(PlacementRefused, match="the engine: GPUs are named, but the GPUs of this machine are not used"):
        Machine(0, device="cpu").place(engine=vllm(gpus=[0]))


def test_gpus_are_read_of_nvidia_smi_as_far_as_they_are_visible():
    everything = seen(LISTING, None)
    assert [gpu.name for gpu in everything.values()] == ["NVIDIA H100", "NVIDIA H100", "NVIDIA L4"]
    assert everything[2].memory_bytes == 23034 * 2**20
    assert seen(LISTING, "2,GPU-aaaa") == {0: everything[2], 1: everything[0]}
    assert seen(LISTING, "") == {}
    assert seen("No devices were found", None) == {}


async def test_a_machine_without_the_program_has_none_and_a_device_with_a_number_is_the_only_one(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert await NvidiaSmi(program=str(tmp_path / "none")).gpus() == {}
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nprint({LISTING!r})")
    program.chmod(0o755)
    assert list(await NvidiaSmi(program=str(program)).gpus()) == [0, 1, 2]
    assert list(await NvidiaSmi(program=str(program), device="cuda:1").gpus()) == [1]


def test_a_process_is_shown_gpus_by_the_names_that_the_service_knows():
    assert shown_to([1, 2], {}) == {"CUDA_VISIBLE_DEVICES": "1,2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert shown_to([1], {"CUDA_VISIBLE_DEVICES": "4,GPU-bbbb"})["CUDA_VISIBLE_DEVICES"] == "GPU-bbbb"
    assert shown_to([], {}) == {}


async def test_started_ranks_see_the_trainers_gpus_and_take_that_of_their_place():
    calls = Calls(2)
    order = group_order(PROCESS, 2, GroupOptions(gpus=[2, 3]), Wishes())
    group = await LocalCluster().start(
        replace(order, flags=(), environment={**order.environment, **ENVIRONMENT}), calls.welcome
    )
    notes = await calls.all()
    assert [(note["devices"], note["LOCAL_RANK"]) for note in notes] == [("2,3", 0), ("2,3", 1)]
    calls.close()
    await group.end()


async def test_each_started_engine_sees_its_own_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(process, "MODULE", shows_devices.__name__)
    vllm_command = tmp_path / "vllm"
    vllm_command.write_text("#!/bin/sh\necho on $CUDA_VISIBLE_DEVICES\n")
    vllm_command.chmod(0o755)
    options = EngineOptions(
        host="127.0.0.1", advertise_host="127.0.0.1", port=0, token="", torch_threads=1, device="cuda", max_batch_size=1,
        log_folder=tmp_path, vllm_command=str(vllm_command),
    )  # fmt: skip
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    policy = PublishedPolicy(name="resources/policy.mine/versions/1", version=1, path=tmp_path)
    starter = EngineStarter(ModuleStarter(warm=False))
    # A start asks nothing of the proxy.
    gate = RemoteGate(0, pytest.fail)
    starting = partial(starter.start, options, policy, notify=lambda *_: None, gate=gate)
    for settings, shown in zip(each_engine(EmbeddedEngine(replicas=2, gpus=[2, 3])), ("2", "3"), strict=True):
        engine = await starting(engine=settings)
        assert f":{shown}/" in engine.address.base_url
        await engine.stop()
    split = each_engine(VllmEngine(kind="vllm", replicas=2, tensor_parallel=2, gpus=[4, 5, 6, 7]))
    for settings, shown in zip(split, ("4,5", "6,7"), strict=True):
        with pytest.raises(EngineFailed, match=f"on {shown}"):
            await starting(engine=settings)


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "none", "gpus": [0, 1]},
        {"kind": "ddp", "ranks": 2, "gpus": [0]},
        {"kind": "ddp", "ranks": 2, "gpus": [0, 1], "cluster": "ray"},
        {"kind": "fsdp2", "ranks": 1, "gpus": [-1]},
    ],
)
def test_ranks_that_name_gpus_name_one_each_of_the_services_machine(wrong):
    with pytest.raises(SettingsInvalid, match=r"settings\.parallel"):
        settings_of(parallel=wrong)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"kind": "none", "reference_gpus": [0, 1]}, "reference_gpus: has 2 for 1 ranks; each has one"),
        (
            {"kind": "none", "gpus": [0], "reference_gpus": [0]},
            "reference_gpus: GPU 0 is in gpus, too, and would not be its own",
        ),
        (
            {"kind": "ddp", "critic_gpus": [0, 1], "cluster": "ray"},
            "critic_gpus: names GPUs of the service's machine; on a cluster it is 'own'",
        ),
        ({"kind": "fsdp2", "reference_gpus": "own"}, "reference_gpus: needs kind none or ddp"),
    ],
)
def test_models_beside_the_policy_that_name_gpus_name_one_for_each_rank(wrong, why):
    with pytest.raises(SettingsInvalid) as refused:
        settings_of("ppo", kl={"kind": "loss"}, parallel=wrong)
    assert [each.field for each in refused.value.violations] == [f"settings.parallel.{wrong['kind']}"]
    assert why in refused.value.violations[0].description


def test_models_that_a_run_does_not_have_get_no_gpus():
    with pytest.raises(SettingsInvalid) as refused:
        settings_of(parallel={"kind": "none", "reference_gpus": "own", "critic_gpus": "own"})
    assert refused.value.violations[0].description == (
        "parallel.reference_gpus: the run has no reference; parallel.critic_gpus: the run has no critic"
    )
