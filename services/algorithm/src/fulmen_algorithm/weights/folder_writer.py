"""Writes complete model folders tensor by tensor: one is whole on a rank while it is written, and no others are."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from fulmen_algorithm.weights.sources import Source, own_bytes, with_each
from fulmen_algorithm.weights.tensor_files import Bytes, Layout, RawTensor, TensorFileWriter, in_file_order
from fulmen_algorithm.weights.torch_tensors import DTYPES, raw_tensor
from fulmen_exchange.ranks import Ranks

INDEX_FILE = "model.safetensors.index.json"
LARGEST_FILE = "50GB"
"""Size above which weights are split into several files, as the library does."""


class ModelFolder(Protocol):
    """Creates the folder of a model, but for the tokenizer."""

    def save_all_but_weights(self, folder: Path) -> None:
        """Creates the folder with the configuration."""

    def save_tensors(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Creates it with tensors too, which get the names that the architecture has in files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToWrite:
    """Tensors that are to be written.

    Attributes:
        sources: The tensors.
        dtype: Type of written numbers.
        copy: Ranks that hold a copy of the weights together, and call together; the first one writes.
    """

    sources: Mapping[str, Source]
    dtype: torch.dtype = torch.float32
    copy: Ranks = field(default_factory=Ranks)

    @property
    def layout(self) -> Layout:
        """Types and shapes of what is written."""
        return {name: (DTYPES[self.type_of(name)], each.shape) for name, each in self.sources.items()}

    def type_of(self, name: str) -> torch.dtype:
        """Returns the type in which a tensor is written."""
        own = self.sources[name].dtype
        return self.dtype if own.is_floating_point else own

    def whole(self, name: str) -> Tensor:
        """Gathers a tensor; all ranks of the copy call it."""
        return self.sources[name].whole()

    def raw(self, name: str, tensor: Tensor) -> RawTensor:
        """Returns the words of a gathered tensor."""
        return raw_tensor(tensor.to("cpu", self.type_of(name)))

    def kept(self, name: str, raw: RawTensor) -> Bytes:
        """Returns this rank's share of a tensor's bytes, for as long as it is needed."""
        content: Bytes = raw.words.view(np.uint8)
        # Words of another type than the tensor's are new, too.
        is_new = self.sources[name].is_copy or self.type_of(name) is not self.sources[name].dtype
        return content if is_new and self.copy.group is None else own_bytes(content, self.copy)


class FolderWriter(Protocol):
    """Writes a folder, one tensor after another."""

    @property
    def order(self) -> Sequence[str]:
        """Names in the order in which tensors are added."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Adds the next tensor."""

    def finish(self) -> None:
        """Completes the folder."""


def folder_writer(tensors: ToWrite, model: ModelFolder, folder: Path, *, by_name: bool) -> FolderWriter:
    """Returns what writes a complete folder.

    Args:
        tensors: The tensors.
        model: Writes the rest.
        folder: Created.
        by_name: Whether files name tensors as the model in memory does. Otherwise the library converts them, which takes all
            of them at a time.
    """
    return _Streamed(tensors, model, folder) if by_name else _Converted(tensors, model, folder)


def write_folder(tensors: ToWrite, model: ModelFolder, folder: Path, *, by_name: bool) -> None:
    """Writes a complete folder; see `folder_writer`. All ranks of the copy call it.

    Raises:
        OSError: if the disk is full.
        FirstRankFailed: on other ranks, if the first one fails.
    """
    writer = folder_writer(tensors, model, folder, by_name=by_name)

    def take(name: str, tensor: Tensor) -> None:
        if tensors.copy.leads:
            writer.add(name, tensor)

    with_each(writer.order, tensors.whole, take, writer.finish, tensors.copy)


class _Streamed:
    """Writes each tensor to its file immediately."""

    def __init__(self, tensors: ToWrite, model: ModelFolder, folder: Path) -> None:
        self._tensors, self._model, self._folder = tensors, model, folder
        self._layout = tensors.layout
        empty = {
            name: torch.empty(each.shape, dtype=tensors.type_of(name), device="meta")
            for name, each in tensors.sources.items()
        }
        self._split = split_torch_state_dict_into_shards(
            empty, filename_pattern="model{suffix}.safetensors", max_shard_size=LARGEST_FILE
        )
        self._files = {
            file: in_file_order({name: self._layout[name] for name in names})
            for file, names in self._split.filename_to_tensors.items()
        }
        self._open: TensorFileWriter | None = None

    @property
    def order(self) -> list[str]:
        return [name for names in self._files.values() for name in names]

    def add(self, name: str, tensor: Tensor) -> None:
        file = self._split.tensor_to_filename[name]
        names = self._files[file]
        if self._open is None:
            if not self._folder.exists():
                self._model.save_all_but_weights(self._folder)
            layout = {each: self._layout[each] for each in names}
            self._open = TensorFileWriter(self._folder / file, layout, {"format": "pt"})
        self._open.add(self._tensors.raw(name, tensor))
        if name == names[-1]:
            self._open.close()
            self._open = None

    def finish(self) -> None:
        if self._split.is_sharded:
            parameters = sum(torch.Size(shape).numel() for _, shape in self._layout.values())
            metadata = {"total_parameters": parameters, **self._split.metadata}
            index = {"metadata": metadata, "weight_map": self._split.tensor_to_filename}
            (self._folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


class _Converted:
    """Collects all tensors for the library, which gives them the names and shapes of the architecture's files."""

    def __init__(self, tensors: ToWrite, model: ModelFolder, folder: Path) -> None:
        self._tensors, self._model, self._folder = tensors, model, folder
        self._whole: dict[str, Tensor] = {}

    @property
    def order(self) -> list[str]:
        return list(self._tensors.sources)

    def add(self, name: str, tensor: Tensor) -> None:
        self._whole[name] = tensor.to("cpu", self._tensors.type_of(name))

    def finish(self) -> None:
        self._model.save_tensors(self._folder, self._whole)
