"""A run begins with a model that was uploaded, and with the same one when it resumes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fulmen.errors import SettingsInvalid
from fulmen.models.files import read_manifest
from fulmen_algorithm.models.bases import BaseModels
from fulmen_algorithm.models.model_store import ModelStore, StoredModel
from fulmen_algorithm.models.uploads import UploadLimits, Uploads
from fulmen_algorithm.runs.creation.rules import RunDraft
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec, RunState
from tests.support.algorithm.model_services import World
from tests.support.algorithm.run_service import NO_HUB, CarryOut, created

LIMITS = UploadLimits(max_bytes=2**30, quota_bytes=2**30, idle_s=60)


@pytest.fixture
def models(tmp_path: Path) -> ModelStore:
    """Returns the models of the service's state folder."""
    return ModelStore(tmp_path / "state/models")


def uploaded(models: ModelStore, folder: Path, alias: str) -> StoredModel:
    uploads = Uploads(models, LIMITS)
    begun = uploads.begin("projects/default", read_manifest(folder), alias)
    for file, arrived in begun.missing:
        writer = uploads.writer(begun.name, file.path)
        writer.write(arrived, (folder / file.path).read_bytes())
        writer.finish()
        writer.close()
    return uploads.commit(begun.name, alias)


def of_base(draft: RunDraft, base: str) -> RunDraft:
    return replace(draft, policy=PolicySpec(name="tiny", origin=PolicyOrigin.BASE, source=base))


async def test_a_run_trains_an_uploaded_model_and_notes_its_digest(
    models: ModelStore, tiny_model: Path, sft_draft: RunDraft, carry_out: CarryOut
) -> None:
    model = uploaded(models, tiny_model, "start")
    by_path = await carry_out(sft_draft)
    entry = await carry_out(replace(of_base(sft_draft, "model:start"), name="projects/default/trainingRuns/second"))
    assert entry.run.provenance["policy.base"] == f"model:{model.name.id}"
    weights = "policy.first_weights.sha256"
    assert entry.run.provenance[weights] == by_path.run.provenance[weights]
    assert entry.run.results == by_path.run.results


async def test_a_run_whose_model_is_gone_fails_and_says_so(
    models: ModelStore, tiny_model: Path, sft_draft: RunDraft, carry_out: CarryOut
) -> None:
    models.delete(uploaded(models, tiny_model, "start"))
    entry = await carry_out(of_base(sft_draft, "model:start"), state=RunState.FAILED)
    assert entry.run.failure_message == "There is no model model:start in projects/default any more."


@pytest.mark.parametrize(
    ("base", "says"),
    [
        ("model:none", "there is no model 'none' in projects/default"),
        ("model:..", "there is no model"),
        ("model:../x", "or model:NAME"),
        ("x", "or model:NAME"),
    ],
)
async def test_a_base_that_is_no_model_is_refused_with_what_to_do(
    models: ModelStore, world: World, sft_draft: RunDraft, base: str, says: str
) -> None:
    with pytest.raises(SettingsInvalid) as refused:
        await created(of_base(sft_draft, base), world, models=BaseModels(models, NO_HUB))
    [violation] = refused.value.violations
    assert violation.field == "policy.base"
    assert says in violation.description
    assert "fulmen model upload" in violation.description
