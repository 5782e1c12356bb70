"""Weights go in place into a model whose architecture stays the same: all of them, or none.

Invariant: everything that can be wrong with new weights is found before the first parameter is written.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from fulmen_algorithm.engine.protocol import WeightsRejected


def read_weights(model: PreTrainedModel, directory: Path) -> dict[str, Tensor]:
    """Reads the safetensors files of a directory and checks them against the model.

    Args:
        model: Only names and shapes are read, so generation may go on meanwhile.
        directory: Holds one or more `*.safetensors` files of the full model.

    Returns:
        One tensor per parameter, on the CPU.

    Raises:
        WeightsRejected: if there is no such directory or file, a file is damaged, or names or shapes differ.
    """
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise WeightsRejected(f"No safetensors file in {str(directory)!r}.", param="path")
    found: dict[str, Tensor] = {}
    for file in files:
        try:
            found.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise WeightsRejected(f"{file.name} cannot be read: {error}", param="path") from error
    # Tied parameters appear once here, under the name that save_pretrained keeps.
    expected = dict(model.named_parameters())
    aliases = set(model.state_dict()) - set(expected)
    if missing := sorted(set(expected) - set(found)):
        raise WeightsRejected(f"{len(missing)} weights are missing, the first is {missing[0]!r}.", param="path")
    if strange := sorted(set(found) - set(expected) - aliases):
        raise WeightsRejected(f"{len(strange)} weights are unknown, the first is {strange[0]!r}.", param="path")
    for name, parameter in expected.items():
        if found[name].shape != parameter.shape:
            raise WeightsRejected(
                f"{name!r} has shape {tuple(found[name].shape)}, the model {tuple(parameter.shape)}.", param="path"
            )
    return {name: found[name] for name in expected}


@torch.no_grad()
def apply_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Copies checked weights into the model in place; runs in the thread that owns the model."""
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])
