"""What Slurm is asked for, and what its answers mean."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from fulmen_algorithm.cluster.gate import Gate, GateOptions
from fulmen_algorithm.cluster.port import Affinity, ClusterFailed, GroupOrder, Resources, Wishes
from fulmen_algorithm.cluster.settings import SlurmSettings
from fulmen_algorithm.cluster.slurm import SlurmLauncher, batch_script
from tests.support.algorithm import fake_slurm
from tests.support.algorithm.clusters import Calls, order_of, remote

GIB = 2**30


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Path]:
    variables = fake_slurm.install(tmp_path)
    with mock.patch.dict(os.environ, variables):
        yield Path(variables["FAKE_SLURM"])


def settings(folder: Path, **given: object) -> SlurmSettings:
    return SlurmSettings(kind="slurm", folder=folder, poll_s=0.1, **given)


def test_the_script_of_a_group():
    each = Resources(cpus=8, gpus=1, memory_bytes=64 * GIB)
    order = GroupOrder(module="any", count=4, wishes=Wishes(each=each, affinity=Affinity.OWN_NODES))
    given = settings(
        Path("/shared/fulmen"),
        partition="gpu",
        account="lab",
        python="/opt/fulmen/bin/python",
        options=["--time=24:00:00", "--constraint=a100"],
    )
    assert batch_script(order, given, Path("/shared/fulmen/fulmen-0123456789ab")) == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=fulmen-0123456789ab\n"
        "#SBATCH --output=/shared/fulmen/fulmen-0123456789ab/log\n"
        "#SBATCH --no-requeue\n"
        "#SBATCH --no-kill\n"
        "#SBATCH --ntasks=4\n"
        "#SBATCH --cpus-per-task=8\n"
        "#SBATCH --mem-per-cpu=8192M\n"
        "#SBATCH --gpus-per-task=1\n"
        "#SBATCH --nodes=4\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --partition=gpu\n"
        "#SBATCH --account=lab\n"
        "#SBATCH --time=24:00:00\n"
        "#SBATCH --constraint=a100\n"
        "export FULMEN_GROUP_FILE=/shared/fulmen/fulmen-0123456789ab/ticket\n"
        "exec srun --kill-on-bad-exit=0 --no-kill --cpus-per-task=8 --gpu-bind=none"
        " /opt/fulmen/bin/python -m fulmen_algorithm.cluster.member\n"
    )


@pytest.mark.parametrize(
    ("affinity", "options"),
    [
        (Affinity.PACK, {"--distribution=block,Pack"}),
        (Affinity.SPREAD, {"--spread-job"}),
        (Affinity.ONE_NODE, {"--nodes=1"}),
        (Affinity.OWN_NODES, {"--nodes=2", "--ntasks-per-node=1"}),
    ],
)
def test_an_affinity_is_an_option(affinity, options):
    order = GroupOrder(module="any", count=2, wishes=Wishes(affinity=affinity))
    script = batch_script(order, settings(Path("/shared")), Path("/shared/fulmen-0"))
    told = {line.removeprefix("#SBATCH ") for line in script.splitlines()}
    placing = {each for each in told if each.startswith(("--nodes", "--ntasks-per", "--spread", "--distribution"))}
    assert placing == options


@pytest.mark.parametrize(
    "wrong", [{"partition": "gpu\n#SBATCH --uid=0"}, {"options": ["--wrap=rm -rf"]}, {"python": "python; reboot"}]
)
def test_settings_that_would_be_more_than_a_word_of_the_script_are_refused(wrong):
    with pytest.raises(ValueError, match="string_pattern_mismatch"):
        settings(Path("/shared"), **wrong)


async def test_the_nodes_are_what_sinfo_tells(slurm, tmp_path):
    nodes = {node.name: node.has for node in await SlurmLauncher(settings(tmp_path)).nodes()}
    assert nodes == {
        "node-a": Resources(cpus=2, gpus=0, memory_bytes=4 * GIB),
        "node-b": Resources(cpus=2, gpus=2, memory_bytes=4 * GIB),
    }


async def test_the_ticket_is_for_this_user_alone_and_goes_with_the_job(slurm, tmp_path):
    gate, calls, shared = Gate(GateOptions()), Calls(1), tmp_path / "shared"
    shared.mkdir()
    with mock.patch.dict(os.environ, order_of(1).environment):
        group = await remote(SlurmLauncher(settings(shared)), gate).start(order_of(1), calls.welcome)
    await calls.all()
    [ticket] = shared.glob("*/ticket")
    assert ticket.stat().st_mode & 0o777 == 0o600
    calls.close()
    await group.end()
    gate.close()
    assert {file.name for file in shared.glob("*/*")} <= {"log"}


async def test_a_job_that_slurm_ends_is_told_with_its_state_and_its_log(slurm, tmp_path):
    gate, shared = Gate(GateOptions()), tmp_path / "shared"
    shared.mkdir()
    launcher = SlurmLauncher(settings(shared, python="/no/such/python"))
    with pytest.raises(ClusterFailed, match=r"job 100 of Slurm is FAILED; its log is .*/log"):
        await remote(launcher, gate).start(order_of(1), Calls(1).welcome)
    gate.close()


async def test_a_slurm_that_is_away_is_told_and_nothing_is_left(slurm, tmp_path):
    (slurm / "down").touch()
    gate, shared = Gate(GateOptions()), tmp_path / "shared"
    shared.mkdir()
    with pytest.raises(ClusterFailed, match="Unable to contact slurm controller"):
        await remote(SlurmLauncher(settings(shared)), gate).start(order_of(1), Calls(1).welcome)
    gate.close()
    assert not list(shared.glob("*"))
