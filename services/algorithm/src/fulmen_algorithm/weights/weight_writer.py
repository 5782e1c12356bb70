"""Writes the weights of a policy for engines: complete, or as a delta against those written before.

Invariant: checksum, delta and folder have the same words, in the dtype in which engines serve. The trainer's own
weights are never rounded.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fulmen_algorithm.training.settings import WeightsKind
from fulmen_algorithm.weights.delta import DELTA_FILE, DeltaWriter
from fulmen_algorithm.weights.folder_writer import ModelFolder, ToWrite, folder_writer
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights
from fulmen_algorithm.weights.sources import FirstRankFailed, Source, all_bytes, with_each
from fulmen_algorithm.weights.tensor_files import (
    Bytes,
    Layout,
    RawTensor,
    combined_digest,
    read_folder,
    read_layout,
    size_of,
)
from fulmen_exchange.ranks import Ranks


@dataclass(slots=True, kw_only=True)
class _Kept:
    """Weights that were written: this rank's share of their bytes and, on the first rank, the checksums of tensors."""

    layout: Layout
    shares: dict[str, Bytes] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


class WeightWriter:
    """Keeps the last written weights in memory, each rank its share, so that a delta needs no file of them."""

    def __init__(self, *, by_name: bool = False) -> None:
        """`by_name` is whether files are known to name tensors as the model in memory does."""
        self._kept: dict[str, _Kept] = {}
        self._by_name = by_name

    def write(
        self,
        sources: Mapping[str, Source],
        model: ModelFolder,
        folder: Path,
        order: WeightsOrder,
        copy: Ranks | None = None,
    ) -> WrittenWeights | None:
        """Writes a folder: a model that an engine can load, or a delta.

        Args:
            sources: The tensors of `published_tensors`.
            model: Writes what belongs to a complete folder besides.
            folder: Created.
            order: The request.
            copy: Ranks that hold a copy of the weights together, and call this together; the first one writes and gets the
                result. None for a rank that holds them alone.

        Raises:
            OSError: if the disk is full.
        """
        tensors = ToWrite(sources=sources, dtype=getattr(torch, order.dtype), copy=copy or Ranks())
        base, new = self._kept.get(order.base_sha256), _Kept(layout=tensors.layout)
        written = None
        try:
            if base is not None and base.layout == new.layout:
                written = _delta(tensors, base, new, folder, order)
            if written is None:
                written, self._by_name = self._complete(tensors, new, model, folder, order)
        except FirstRankFailed:
            return None
        if order.keep and self._by_name:
            self._kept = {k: v for k, v in self._kept.items() if k == order.base_sha256} | {written.sha256: new}
        return written if tensors.copy.leads else None

    def _complete(
        self, tensors: ToWrite, new: _Kept, model: ModelFolder, folder: Path, order: WeightsOrder
    ) -> tuple[WrittenWeights, bool]:
        """Writes a complete folder; also returns whether its files name tensors as the model does."""
        writer = folder_writer(tensors, model, folder, by_name=self._by_name)

        def take(name: str, tensor: Tensor) -> None:
            raw = tensors.raw(name, tensor)
            if order.keep:
                new.shares[name] = tensors.kept(name, raw)
            if tensors.copy.leads:
                new.digests[name] = raw.digest()
                writer.add(name, tensor)

        def finish() -> tuple[WrittenWeights, bool]:
            writer.finish()
            return _described(folder, new, order)

        return with_each(writer.order, tensors.whole, take, finish, tensors.copy)


def _delta(tensors: ToWrite, base: _Kept, new: _Kept, folder: Path, order: WeightsOrder) -> WrittenWeights | None:
    """Writes a delta; None if it saves too little."""
    copy = tensors.copy
    limit_bytes = order.dense_above * sum(size_of(*each) for each in new.layout.values())
    delta = DeltaWriter(limit_bytes=limit_bytes)

    def gather(name: str) -> tuple[Tensor, Bytes]:
        return tensors.whole(name), all_bytes(base.shares[name], size_of(*new.layout[name]), copy)

    def take(name: str, found: tuple[Tensor, Bytes]) -> None:
        tensor, old = found
        raw = tensors.raw(name, tensor)
        if order.keep:
            new.shares[name] = tensors.kept(name, raw)
        if copy.leads:
            before = RawTensor(dtype=raw.dtype, shape=raw.shape, words=old.view(raw.words.dtype))
            delta.add(name, before, base.digests[name], raw)

    def finish() -> WrittenWeights | None:
        if delta.too_large():
            return None
        folder.mkdir(parents=True, exist_ok=True)
        size = delta.write(folder / DELTA_FILE)
        if size.size_bytes > limit_bytes:
            shutil.rmtree(folder)
            return None
        new.digests.update(delta.digests)
        return WrittenWeights(
            kind=WeightsKind.DELTA,
            sha256=combined_digest(new.digests),
            size_bytes=size.size_bytes,
            full_bytes=size.full_bytes,
            changed_share=size.changed_share,
            base_sha256=order.base_sha256,
        )

    with closing(delta):
        return with_each(list(new.layout), gather, take, finish, copy)


def _described(folder: Path, new: _Kept, order: WeightsOrder) -> tuple[WrittenWeights, bool]:
    """Describes a complete folder; its files may name or split tensors otherwise than the model in memory does."""
    config = folder / "config.json"
    content = json.loads(config.read_text())
    if content.get("dtype") != order.dtype:
        config.write_text(json.dumps({**content, "dtype": order.dtype}, indent=2) + "\n")
    in_files = read_layout(folder)
    by_name = in_files == new.layout
    sha256 = combined_digest(new.digests) if by_name else read_folder(folder).sha256()
    written = WrittenWeights(
        kind=WeightsKind.FULL,
        sha256=sha256,
        size_bytes=sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        full_bytes=sum(size_of(*each) for each in in_files.values()),
    )
    return written, by_name
