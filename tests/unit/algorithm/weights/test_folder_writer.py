"""Folders that are written tensor by tensor are those of the library."""

from __future__ import annotations

import json

import pytest
import torch

from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.weights import folder_writer
from fulmen_algorithm.weights.publishing import WeightsOrder
from fulmen_algorithm.weights.sources import with_each
from fulmen_exchange.ranks import Ranks


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_is_that_of_the_library_file_by_file(dtype, model_dir, tmp_path):
    policy = PolicyModel.load(model_dir)
    policy.publish(tmp_path / "ours", WeightsOrder(dtype=dtype))
    policy.model.to(getattr(torch, dtype)).save_pretrained(tmp_path / "theirs")
    for theirs in (tmp_path / "theirs").iterdir():
        ours = tmp_path / "ours" / theirs.name
        if theirs.suffix == ".json":
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text())
        else:
            assert ours.read_bytes() == theirs.read_bytes()


def test_weights_that_are_too_large_for_one_file_are_in_several_which_the_library_reads(
    model_dir, tmp_path, monkeypatch
):
    monkeypatch.setattr(folder_writer, "LARGEST_FILE", "20KB")
    policy = PolicyModel.load(model_dir)
    policy.publish(tmp_path / "ours", WeightsOrder())
    sizes = [file.stat().st_size for file in (tmp_path / "ours").glob("*.safetensors")]
    assert len(sizes) > 1
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    total = sum(parameter.numel() for parameter in policy.model.parameters())
    assert index["metadata"] == {"total_parameters": total, "total_size": 4 * total}
    loaded = PolicyModel.load(tmp_path / "ours").model
    for (name, one), (_, other) in zip(loaded.named_parameters(), policy.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_an_error_is_raised_after_the_last_tensor_was_gathered():
    gathered, taken = [], []

    def take(name: str, _: None) -> None:
        taken.append(name)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        with_each("abc", gathered.append, take, lambda: 1, Ranks())
    assert (gathered, taken) == (["a", "b", "c"], ["a"])
