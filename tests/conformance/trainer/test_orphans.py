"""Ranks that cannot start leave nothing behind. (A killed service: tests/integration/algorithm.)"""

from __future__ import annotations

import psutil
import pytest

from fulmen_algorithm.runs.failure import RunFailed, TrainerLost
from fulmen_algorithm.trainers.processes import GroupOptions
from fulmen_algorithm.trainers.rank_group import RankGroupTrainer
from fulmen_algorithm.training.compute import ComputeSettings, Ddp
from tests.support.algorithm.trainers import setup_of
from tests.support.algorithm.warm import here

pytestmark = pytest.mark.xdist_group("trainers")


async def test_a_folder_without_a_model_is_refused_and_leaves_no_process(tmp_path):
    options = GroupOptions(cluster=here())
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(RunFailed, match="contains no complete model"):
        await RankGroupTrainer.open(setup_of(tmp_path, ComputeSettings(parallel=Ddp(ranks=1))), options)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


async def test_ranks_that_do_not_start_leave_no_socket(tmp_path):
    options = GroupOptions(device="none", cluster=here())
    before = unix_sockets()
    with pytest.raises(TrainerLost, match="did not start"):
        await RankGroupTrainer.open(setup_of(tmp_path, ComputeSettings(parallel=Ddp(ranks=1))), options)
    assert unix_sockets() <= before


def unix_sockets() -> set[str]:
    """Returns the paths of this process' own sockets, which are kept when the files are gone."""
    return {str(socket.laddr) for socket in psutil.Process().net_connections(kind="unix") if socket.laddr}
