"""An operator says which clusters there are; a run can name those, and no others."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fulmen.errors import FulmenError, SettingsInvalid
from fulmen_algorithm.cluster.settings import JoinedSettings, RaySettings, SlurmSettings
from fulmen_algorithm.settings import AlgorithmServiceSettings
from tests.support.algorithm.run_service import created

CLUSTERS = {
    "hpc": {"kind": "slurm", "folder": "/shared/fulmen", "partition": "gpu"},
    "ray": {"kind": "ray", "address": "10.0.0.7:6379"},
    "machines": {"kind": "joined"},
}


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("FULMEN_ALGORITHM_DEV_MODE", "true")
    return monkeypatch


def test_without_a_setting_there_is_this_machine(service):
    assert list(AlgorithmServiceSettings.from_environment().clusters) == ["local"]


def test_the_clusters_of_the_setting_are_all_there_are(service):
    service.setenv("FULMEN_ALGORITHM_CLUSTERS", json.dumps(CLUSTERS))
    clusters = AlgorithmServiceSettings.from_environment().clusters
    assert isinstance(clusters["hpc"], SlurmSettings)
    assert isinstance(clusters["ray"], RaySettings)
    assert isinstance(clusters["machines"], JoinedSettings)
    assert len(clusters) == 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"hpc": {"kind": "pbs"}},
        {"hpc": {"kind": "slurm"}},
        {"two words": {"kind": "local"}},
        {"hpc": {**CLUSTERS["hpc"], "walltime": 3}},
    ],
)
def test_a_cluster_that_cannot_be_is_refused_at_the_start(service, wrong):
    service.setenv("FULMEN_ALGORITHM_CLUSTERS", json.dumps(wrong))
    with pytest.raises(SettingsInvalid) as refused:
        AlgorithmServiceSettings.from_environment()
    assert all(each.field.startswith("FULMEN_ALGORITHM_CLUSTERS") for each in refused.value.violations)


async def test_a_run_that_names_another_cluster_is_not_created(world, grpo_draft):
    settings = {**json.loads(grpo_draft.settings_json), "parallel": {"kind": "ddp", "ranks": 2, "cluster": "hpc"}}
    draft = replace(grpo_draft, settings_json=json.dumps(settings))
    with pytest.raises(FulmenError) as refused:
        await created(draft, world)
    assert "'hpc' is not in the service's setting FULMEN_ALGORITHM_CLUSTERS (local; docs/clusters.md)" in str(
        refused.value.violations  # type: ignore[attr-defined]
    )
    assert (await created(draft, world, clusters=["hpc"])).name
