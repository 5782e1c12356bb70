"""Replaces the weights of a model in place, all or none.

Invariant: new weights are read, checked and converted while the model generates, before the first parameter is
replaced. The pause only points the parameters to other memory, or on a GPU copies it there.

An engine may hold bfloat16 weights as float32, such as on a CPU. The original bits are then the upper 16 of each value,
so that a delta can be applied and checked without a second copy of the weights.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fulmen_algorithm.engines.embedded.protocol import WeightsConflict, WeightsRejected
from fulmen_algorithm.weights.delta import DELTA_FILE, DeltaDamaged, WrongBase, apply
from fulmen_algorithm.weights.tensor_files import (
    Layout,
    RawTensor,
    TensorFileDamaged,
    Weights,
    Words,
    combined_digest,
    layout,
    read_folder,
)
from fulmen_algorithm.weights.torch_tensors import DTYPES, published_tensors, raw_tensor, tensor_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Identity of the published weights that a model holds.

    Attributes:
        layout: Type and shape of each published tensor.
        digests: Checksum of each tensor.
    """

    layout: Layout = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def sha256(self) -> str:
        """Checksum of the weights; one that matches none before the first update."""
        return combined_digest(self.digests) if self.digests else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Checked weights, ready to be swapped in.

    Attributes:
        tensors: Changed tensors by name, in the model's number format.
        served: Identity of the model's weights afterwards; None for adapters, which leave the model's weights
            unchanged.
        size_bytes: Size of the files.
    """

    tensors: Mapping[str, Tensor]
    served: Served | None
    size_bytes: int = 0


def describe(weights: Weights) -> Served:
    """Computes the checksums of weights."""
    return Served(layout=layout(weights.tensors), digests={name: weights.digest_of(name) for name in weights.tensors})


def prepare_full(model: nn.Module, folder: Path, sha256: str = "") -> Prepared:
    """Reads the safetensors files of a folder and checks them against the model.

    Args:
        model: The model; only names, types and shapes are read, so that it may generate meanwhile.
        folder: Folder with one or more `*.safetensors` files of the full model.
        sha256: Expected checksum of the weights; empty for no check.

    Raises:
        WeightsRejected: if a folder or file is missing or damaged, or names or shapes differ.
    """
    try:
        weights = read_folder(folder)
        served = describe(weights)
    except (TensorFileDamaged, OSError) as error:
        raise WeightsRejected(f"The weights cannot be read: {error}", param="path") from error
    if sha256 and served.sha256 != sha256:
        raise WeightsRejected("The checksum of the weights does not match.", param="sha256")
    state = model.state_dict()
    expected = published_tensors(model)
    found = weights.tensors
    if missing := sorted(set(expected) - set(found)):
        raise WeightsRejected(f"{len(missing)} weights are missing, the first is {missing[0]!r}.", param="path")
    if strange := sorted(set(found) - set(state)):
        raise WeightsRejected(f"{len(strange)} weights are unknown, the first is {strange[0]!r}.", param="path")
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            raise WeightsRejected(
                f"{name!r} has shape {found[name].shape}, the model {tuple(tensor.shape)}.", param="path"
            )
    tensors = {name: tensor_of(found[name], tensor.dtype) for name, tensor in expected.items()}
    return Prepared(tensors=tensors, served=served, size_bytes=_size_of(folder))


def prepare_delta(model: nn.Module, served: Served, folder: Path, sha256: str = "") -> Prepared:
    """Applies a delta to a copy of the model's weights, and verifies the result.

    Raises:
        WeightsConflict: if the delta applies to other weights; complete weights must be sent.
        WeightsRejected: if the file is damaged, or the checksum of the result differs.
    """
    present = published_tensors(model)
    if not _recoverable(present, served.layout):
        raise WeightsConflict("The published weights cannot be recovered from the engine's own format.")
    base = Weights(tensors=_Recovered(present, served.layout), digests=dict(served.digests))
    try:
        new = apply(base, folder / DELTA_FILE)
    except WrongBase as error:
        raise WeightsConflict(str(error)) from error
    except (DeltaDamaged, OSError) as error:
        raise WeightsRejected(f"The delta cannot be read: {error}", param="path") from error
    if sha256 and new.sha256() != sha256:
        raise WeightsRejected("The delta does not produce the requested weights.", param="sha256")
    changed = [name for name in present if new.digests[name] != served.digests[name]]
    return Prepared(
        tensors={name: tensor_of(new.tensors[name], present[name].dtype) for name in changed},
        served=Served(layout=served.layout, digests=new.digests),
        size_bytes=_size_of(folder),
    )


@torch.no_grad()
def replace_tensors(present: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Replaces the present tensors by verified ones; runs in the model thread."""
    for name, tensor in new.items():
        if present[name].device == tensor.device:
            present[name].data = tensor
        else:
            present[name].copy_(tensor)


class _Recovered(Mapping[str, RawTensor]):
    """The published words of a model's tensors, computed on access."""

    def __init__(self, present: Mapping[str, Tensor], layout: Layout) -> None:
        self._present = present
        self._layout = layout

    def __getitem__(self, name: str) -> RawTensor:
        dtype, shape = self._layout[name]
        raw = raw_tensor(self._present[name])
        if raw.dtype == dtype:
            return raw
        # The upper half of each little-endian word.
        words: Words = np.ascontiguousarray(raw.words.view(np.uint16)[1::2])
        return RawTensor(dtype=dtype, shape=shape, words=words)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)


def _recoverable(present: Mapping[str, Tensor], served: Layout) -> bool:
    """Returns whether the published bits can be recovered from the model's weights."""
    pairs = [(DTYPES[t.dtype], served.get(name, ("", ()))[0]) for name, t in present.items()]
    return set(present) == set(served) and all(own == sent or (own, sent) == ("F32", "BF16") for own, sent in pairs)


def _size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
