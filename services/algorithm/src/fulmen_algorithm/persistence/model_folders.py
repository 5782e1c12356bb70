"""Folders of published models: each appears atomically, is immutable, and is removed when no version needs it.

A complete folder is rebuilt from another one and deltas without torch, and verified before it appears.
"""

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChainLink, SavedModel
from fulmen_algorithm.training.files import appear
from fulmen_algorithm.training.settings import WeightsKind
from fulmen_algorithm.weights.delta import DELTA_FILE, DeltaError, apply
from fulmen_algorithm.weights.publishing import WrittenWeights
from fulmen_algorithm.weights.tensor_files import WEIGHTS_FILE, TensorFileDamaged, read_folder, write_tensors

_REMOVED = ".removed-"
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_EPOCH = re.compile(r"epoch-(\d{8})")


class ModelFolders:
    """The folders below `models` of one run, in a folder for each epoch of its lease.

    An earlier owner of the run removes nothing of a later one.
    """

    def __init__(self, models: Path, *, epoch: int = 0) -> None:
        """Creates no folder yet."""
        self._models = models
        self._epoch = epoch
        self._folder = models / f"epoch-{epoch:08d}" if epoch else models

    async def save(self, write: Callable[[Path], Awaitable[WrittenWeights]], step: int) -> SavedModel:
        """Calls `write` with a new folder, then renames it to its step, checksum and kind."""
        aside = self._folder / ".writing"
        await asyncio.to_thread(self._make_room, aside)
        written = await write(aside)
        path = await asyncio.to_thread(self._place, aside, _name(step, written))
        return SavedModel(
            path=path,
            sha256=written.sha256,
            size_bytes=written.size_bytes,
            kind=written.kind,
            full_bytes=written.full_bytes,
            changed_share=written.changed_share,
            adapters=written.adapters,
        )

    async def rebuild(self, chain: Sequence[ChainLink], step: int) -> Path:
        """Rebuilds a complete folder from a base folder and deltas.

        Raises:
            RunFailed: if a file is missing, damaged, or does not match.
        """
        path = self._folder / f"{step:06d}-{chain[-1].sha256[:12]}"
        if path.exists():
            return path
        try:
            return await asyncio.to_thread(self._rebuild, chain, path)
        except (DeltaError, TensorFileDamaged, FileNotFoundError) as error:
            # The error's full text contains the path.
            reason = error.strerror if isinstance(error, FileNotFoundError) else error
            raise RunFailed(f"The weights of step {step} cannot be rebuilt: {reason}") from error

    async def prune(self, keep: Sequence[Path]) -> list[Path]:
        """Removes all other folders, in a thread, since large models take seconds; returns them."""
        return await asyncio.to_thread(self._prune, keep)

    def _make_room(self, aside: Path) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)

    def _prune(self, keep: Sequence[Path]) -> list[Path]:
        removed = [
            path
            for folder in self._own_and_earlier()
            for path in folder.iterdir()
            if path not in keep and not path.name.startswith(".") and not _EPOCH.fullmatch(path.name)
        ]
        for path in removed:
            # Under another name first: one that a killed service has removed in part must not pass for whole.
            aside = path.with_name(f"{_REMOVED}{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
        for folder in self._own_and_earlier():
            for path in folder.glob(f"{_REMOVED}*"):
                shutil.rmtree(path)
        return removed

    def _own_and_earlier(self) -> list[Path]:
        found = [self._models] if self._models.is_dir() else []
        for path in [*self._models.iterdir()] if found else ():
            match = _EPOCH.fullmatch(path.name)
            if match and int(match[1]) <= self._epoch:
                found.append(path)
        return found

    def _rebuild(self, chain: Sequence[ChainLink], path: Path) -> Path:
        aside = self._folder / f".rebuilding-{path.name}"
        shutil.rmtree(aside, ignore_errors=True)
        weights = read_folder(chain[0].path)
        if chain[0].sha256 and weights.sha256() != chain[0].sha256:
            raise TensorFileDamaged(f"{chain[0].path.name} does not have the checksum of its version.")
        for link in chain[1:]:
            weights = apply(weights, link.path / DELTA_FILE)
            if weights.sha256() != link.sha256:
                raise TensorFileDamaged(f"{link.path.name} does not produce the weights of its version.")
        shutil.copytree(chain[0].path, aside, ignore=shutil.ignore_patterns(*_WEIGHTS))
        write_tensors(aside / WEIGHTS_FILE, weights.tensors, {"format": "pt"})
        return self._place(aside, path.name)

    def _place(self, aside: Path, name: str) -> Path:
        # The same weights, from before a restart: the version that is published names that folder.
        known = next((folder / name for folder in self._own_and_earlier() if (folder / name).exists()), None)
        path = known or self._folder / name
        if known is not None:
            shutil.rmtree(aside)
        else:
            appear(aside, path)
        return path


def copy_model(source: Path, target: Path) -> None:
    """Copies a folder of weights; the copy appears atomically."""
    aside = target.with_name(f".copying-{target.name}")
    shutil.rmtree(aside, ignore_errors=True)
    shutil.copytree(source, aside)
    appear(aside, target)


def _name(step: int, written: WrittenWeights) -> str:
    match written.kind:
        case WeightsKind.DELTA:
            made = f"-from-{written.base_sha256[:12]}"
        case WeightsKind.LORA:
            made = "-lora"
        case WeightsKind.FULL:
            made = ""
    return f"{step:06d}-{written.sha256[:12]}{made}"
