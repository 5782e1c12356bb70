"""Writes the weights of a policy for engines: complete, or as a delta against those written before.

Invariant: checksum, delta and folder are of the same words: those of the dtype in which engines serve. The
trainer's own weights are never rounded.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fulmen_algorithm.training.settings import WeightsKind
from fulmen_algorithm.weights.delta import DELTA_FILE, TensorsDiffer, encode, layout
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights
from fulmen_algorithm.weights.tensor_files import RawTensor, Weights, read_folder, word_type

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_UPPER_HALF = np.uint32(16)

Save = Callable[[Path, Mapping[str, Tensor]], None]
"""Writes a complete model folder with the given tensors instead of the model's own."""


def published_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns a model's tensors by name: parameters, each once whatever names it has, and buffers that are saved."""
    state = model.state_dict(keep_vars=True)
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    return {name: tensor for name, tensor in state.items() if name in names}


def raw_tensor(tensor: Tensor) -> RawTensor:
    """Returns the words of a tensor; on the CPU they are its own memory."""
    flat = tensor.detach().cpu().contiguous().flatten()
    dtype = DTYPES[tensor.dtype]
    words = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return RawTensor(dtype=dtype, shape=tuple(tensor.shape), words=words.view(word_type(dtype)))


def tensor_of(raw: RawTensor, dtype: torch.dtype) -> Tensor:
    """Converts words to a tensor; bfloat16 becomes float32 bit by bit, for any number."""
    if raw.dtype == "BF16" and dtype is torch.float32:
        words = raw.words.astype(np.uint32)
        words <<= _UPPER_HALF
        return torch.from_numpy(words).view(torch.float32).reshape(raw.shape)
    own = next(kind for kind, name in DTYPES.items() if name == raw.dtype)
    tensor = torch.from_numpy(np.array(raw.words).view(np.uint8)).view(own)
    return tensor.reshape(raw.shape).to(dtype)


class WeightWriter:
    """Keeps the last written weights in memory, so that a delta needs no file of them."""

    def __init__(self) -> None:
        self._kept: dict[str, Weights] = {}

    def write(self, tensors: Mapping[str, Tensor], save: Save, folder: Path, order: WeightsOrder) -> WrittenWeights:
        """Writes a folder: a model that an engine can load, or a delta.

        Args:
            tensors: As returned by `published_tensors`.
            save: Writes a complete folder.
            folder: Created.
            order: The request.

        Raises:
            OSError: if the disk is full.
        """
        dtype = getattr(torch, order.dtype)
        cast = {name: t.detach().to("cpu", dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        if order.keep:
            # A copy, because the next step changes the weights in place.
            cast = {name: t.clone() if t.data_ptr() == tensors[name].data_ptr() else t for name, t in cast.items()}
        new = Weights(tensors={name: raw_tensor(tensor) for name, tensor in cast.items()})
        base = self._kept.get(order.base_sha256)
        written = None if base is None else _delta(base, new, folder, order)
        if written is None:
            save(folder, cast)
            written = _complete(new, folder, order)
        if order.keep and written.sha256 == new.sha256():
            self._kept = {k: v for k, v in self._kept.items() if k == order.base_sha256} | {written.sha256: new}
        return written


def _delta(base: Weights, new: Weights, folder: Path, order: WeightsOrder) -> WrittenWeights | None:
    """Writes a delta; None if it saves too little."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        size = encode(base, new, folder / DELTA_FILE)
    except TensorsDiffer:
        size = None
    if size is None or size.size_bytes > order.dense_above * size.full_bytes:
        shutil.rmtree(folder)
        return None
    return WrittenWeights(
        kind=WeightsKind.DELTA,
        sha256=new.sha256(),
        size_bytes=size.size_bytes,
        full_bytes=size.full_bytes,
        changed_share=size.changed_share,
        base_sha256=order.base_sha256,
    )


def _complete(new: Weights, folder: Path, order: WeightsOrder) -> WrittenWeights:
    """Describes a complete folder; its files may name or split tensors otherwise than the model in memory does."""
    config = folder / "config.json"
    content = json.loads(config.read_text())
    if content.get("dtype") != order.dtype:
        config.write_text(json.dumps({**content, "dtype": order.dtype}, indent=2) + "\n")
    files = read_folder(folder)
    weights = new if layout(files.tensors) == layout(new.tensors) else files
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return WrittenWeights(
        kind=WeightsKind.FULL, sha256=weights.sha256(), size_bytes=size, full_bytes=weights.size_bytes
    )
