"""The versions of a run's policy on this machine: their folders, how the next is written, how one is rebuilt.

A version is a complete folder, adapters, or a delta against the version before. Invariant: every version that is kept
has its whole chain, back to a complete folder; and weights rebuilt from a chain are used only if they have the
checksum of the version.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.policy.trainer import WeightsWriter, WritesBehind
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChainLink, PublishedPolicy, SavedModel
from fulmen_algorithm.training.settings import DeltaWeights, LoraSettings, WeightsKind, WeightsSettings
from fulmen_algorithm.weights.publishing import WeightsOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One version as recorded in `versions.jsonl`.

    Attributes:
        version: Its number.
        name: `resources/policy.{policy}/versions/{n}`.
        step: Training step of the run after which the weights were written.
        last_step: Last training step whose weights these are; later than `step` if steps in between changed none.
        path: Folder with the weights.
        kind: Content of the folder.
        sha256: Of the weights in the served dtype; empty in records of earlier releases.
        base: delta: the version it applies to; 0 for others.
        adapters: lora: names of the adapters.
    """

    version: int
    name: str
    step: int
    path: Path
    kind: WeightsKind = WeightsKind.FULL
    sha256: str = ""
    base: int = 0
    adapters: tuple[str, ...] = ()
    last_step: int = 0

    @classmethod
    def read(cls, record: Mapping[str, object], files: RunFiles) -> "VersionRecord":
        """Parses a line of `versions.jsonl` of a run's files."""
        names = record.get("adapters", ())
        return cls(
            version=int(str(record["version"])),
            name=str(record["name"]),
            step=int(str(record["step"])),
            path=files.path_of(str(record["path"])),
            kind=WeightsKind(str(record.get("kind", "full"))),
            sha256=str(record.get("sha256", "")),
            base=int(str(record.get("base", 0))),
            adapters=tuple(map(str, names)) if isinstance(names, Sequence) else (),
            last_step=int(str(record.get("last_step", record["step"]))),
        )

    def line(self, files: RunFiles) -> dict[str, object]:
        """Formats a line of `versions.jsonl`."""
        line: dict[str, object] = {"version": self.version, "name": self.name, "step": self.step}
        line |= {"path": files.place_of(self.path), "kind": self.kind.value, "sha256": self.sha256}
        if self.base:
            line["base"] = self.base
        if self.last_step > self.step:
            line["last_step"] = self.last_step
        return line | ({"adapters": list(self.adapters)} if self.adapters else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class BestVersion:
    """The version with the best validation result so far.

    Attributes:
        version: Its number.
        step: Training step of its weights.
        path: Folder of its weights.
        validation: Its validation result.
    """

    version: int
    step: int
    path: str
    validation: float

    @classmethod
    def read(cls, note: Mapping[str, object]) -> "BestVersion":
        """Reads the note of a run."""
        return cls(
            version=int(str(note["version"])),
            step=int(str(note["step"])),
            path=str(note["path"]),
            validation=float(str(note["validation"])),
        )


class Versions:
    """The versions of one policy, and their folders."""

    def __init__(
        self,
        *,
        files: RunFiles,
        trainer: WeightsWriter,
        weights: WeightsSettings,
        lora: LoraSettings | None = None,
        base_model: Path | None = None,
        purpose: str = "",
    ) -> None:
        """`base_model` is the folder on which adapters were trained; `purpose` see `policy.PublishSettings`."""
        self._files = files
        self._trainer = trainer
        self._weights = weights
        self._lora = lora
        self._base_model = base_model
        self._purpose = purpose
        self._base: VersionRecord | None = None
        self._rebuilt: dict[int, Path] = {}
        self._rebuilding = asyncio.Lock()
        self._at_hand = 0
        self.records = {
            record.version: record for record in (VersionRecord.read(line, files) for line in files.versions())
        }

    async def write(self, step: int, *, whole: bool = False) -> SavedModel:
        """Writes the present weights, as a delta against the served version if possible and small enough.

        Args:
            step: Step of the weights.
            whole: Whether to write complete weights: for the last version, or for a new engine.
        """
        order, base = self._order(whole=whole)
        saved = await self._files.save_model(partial(self._trainer.write_weights, order=order), step)
        if self._lora is not None and whole and not self._lora.roles:
            return replace(saved, merged=await self._merged(step))
        return _based(saved, base)

    async def copied(self, trainer: WritesBehind, step: int) -> Callable[[], Awaitable[SavedModel]]:
        """Copies the current weights, and returns a function that writes them as `write` does while the trainer
        continues."""
        order, base = self._order(whole=False)
        write = await trainer.copy_weights(order)

        async def save() -> SavedModel:
            return _based(await self._files.save_model(write, step), base)

        return save

    def _order(self, *, whole: bool) -> tuple[WeightsOrder, VersionRecord | None]:
        """Returns how the next version is written, and the version against which a delta is."""
        delta = self._weights if isinstance(self._weights, DeltaWeights) and self._lora is None else None
        base = self._base if delta is not None and not whole else None
        if delta is not None and base is not None and len(self.chain(base.version)) >= delta.full_every:
            base = None
        order = WeightsOrder(
            dtype=self._weights.number_format,
            base_sha256=base.sha256 if base is not None else "",
            dense_above=delta.dense_above if delta is not None else 1.0,
            keep=delta is not None,
        )
        return order, base

    def can_remain(self, version: int, *, last: bool) -> bool:
        """Returns whether a version can stay the newest; the last one of a run must be complete, or have merged weights."""
        record = self.records.get(version)
        if record is None or not last:
            return record is not None
        merges = self._lora is not None and not self._lora.roles
        return record.kind is not WeightsKind.DELTA and not merges

    async def again(self, version: int) -> SavedModel:
        """Returns the complete weights of an older version; adapters also merged.

        Raises:
            RunFailed: if they are missing.
        """
        record = self.records.get(version)
        if record is None or record.kind is WeightsKind.DELTA or not record.path.exists():
            folder = await self.materialise(version)
            saved = SavedModel(path=folder, sha256=self.records[version].sha256, size_bytes=0)
        else:
            merged = None
            if record.kind is WeightsKind.LORA and self._lora is not None and not self._lora.roles:
                merged = await self._merged(record.step, adapters=record.path)
            saved = SavedModel(
                path=record.path,
                sha256=record.sha256,
                size_bytes=0,
                kind=record.kind,
                adapters=record.adapters,
                merged=merged,
            )
        return replace(saved, size_bytes=sum(file.stat().st_size for file in saved.path.rglob("*.safetensors")))

    async def _merged(self, step: int, *, adapters: Path | None = None) -> Path:
        """Writes a complete folder with the adapter of a folder merged; of the present one if None."""
        order = WeightsOrder(dtype=self._weights.number_format, merged=True, adapters=str(adapters or ""))
        return (await self._files.save_model(partial(self._trainer.write_weights, order=order), step)).path

    def describe(self, saved: SavedModel) -> dict[str, object]:
        """Returns the description of a version's weights for its resource."""
        description: dict[str, object] = {
            "kind": saved.kind.value,
            "path": self._files.place_of(saved.path),
            "sha256": saved.sha256,
            "dtype": self._weights.number_format,
            "size_bytes": saved.size_bytes,
        }
        if self._purpose:
            description["purpose"] = self._purpose
        if saved.base:
            base = self.records[saved.base]
            description |= {"base": base.name, "base_sha256": base.sha256}
        if saved.kind is WeightsKind.LORA:
            base_model = "" if self._base_model is None else self._files.place_of(self._base_model)
            description |= {"base_model": base_model, "adapters": list(saved.adapters)}
            description |= {"merged": self._files.place_of(saved.merged)} if saved.merged else {}
        return description

    async def as_published(self, saved: SavedModel, description: Mapping[str, object]) -> SavedModel:
        """Returns saved weights in the folders that the description of their version names."""
        place = self._files.model_placed
        path, merged = await place(saved.path, str(description["path"])), saved.merged
        if merged is not None and "merged" in description:
            merged = await place(merged, str(description["merged"]))
        return replace(saved, path=path, merged=merged)

    def add(self, *, version: int, name: str, step: int, saved: SavedModel) -> PublishedPolicy:
        """Records a published version, replacing a record from before a crash."""
        record = VersionRecord(
            version=version,
            name=name,
            step=step,
            path=saved.path,
            kind=saved.kind,
            sha256=saved.sha256,
            base=saved.base,
            adapters=saved.adapters,
            last_step=step,
        )
        self._record(record)
        return self.published(version)

    def unchanged(self, version: int, step: int) -> None:
        """Records that a version has the weights of a later step too."""
        if self.records[version].last_step < step:
            self._record(replace(self.records[version], last_step=step))

    def _record(self, record: VersionRecord) -> None:
        self._files.append_version(record.line(self._files))
        self.records[record.version] = record

    @contextmanager
    def publishing(self, version: int) -> Iterator[None]:
        """Marks a version as being published; within the context, the trainer can write its weights again."""
        self._at_hand = version
        try:
            yield
        finally:
            self._at_hand = 0

    def served(self, version: int) -> None:
        """Records the served version, against which the next delta is written."""
        self._base = self.records[version] if self.records[version].sha256 else None

    def chain(self, version: int) -> list[VersionRecord]:
        """Lists the folders from which a version is rebuilt: a complete folder, then deltas in order.

        Raises:
            RunFailed: if the version or a dependency is unknown.
        """
        links: list[VersionRecord] = []
        number = version
        while not links or links[-1].kind is WeightsKind.DELTA:
            record = self.records.get(number)
            if record is None or len(links) > len(self.records):
                raise RunFailed(f"Version {version} cannot be rebuilt: version {number} is unknown.")
            links.append(record)
            number = record.base
        return links[::-1]

    def published(self, version: int) -> PublishedPolicy:
        """Returns a version for engines.

        Raises:
            RunFailed: if the version is unknown.
        """
        record = self.chain(version)[-1]
        base = self.records.get(record.base)
        return PublishedPolicy(
            name=record.name,
            version=version,
            path=record.path,
            kind=record.kind,
            sha256=record.sha256,
            base_version=record.base,
            base_sha256=base.sha256 if base is not None else "",
            base_model=self._base_model if record.kind is WeightsKind.LORA else None,
            adapters={name: record.path / name for name in record.adapters},
            rebuild=partial(self.materialise, version) if record.kind is WeightsKind.DELTA else None,
        )

    async def materialise(self, version: int) -> Path:
        """Returns a complete folder of a version, rebuilt from its chain and verified if necessary.

        Raises:
            RunFailed: if a dependency is missing or damaged, or the version consists of adapters.
        """
        links = self.chain(version)
        if links[0].kind is WeightsKind.LORA:
            raise RunFailed(f"Version {version} consists of adapters; use the merged folder of the run's last version.")
        if len(links) > 1:
            chain = [ChainLink(path=link.path, sha256=link.sha256) for link in links]
            async with self._rebuilding:
                try:
                    self._rebuilt[version] = await self._files.rebuild_model(chain, links[-1].step)
                except RunFailed:
                    if version != self._at_hand:
                        raise
                    # While it is being published, the trainer still has its weights.
                    self._rebuilt[version] = (await self.write(links[-1].step, whole=True)).path
            return self._rebuilt[version]
        if not (await self._files.fetched(links[0].path)).exists():
            raise RunFailed(f"The folder of version {version} no longer exists.")
        return links[0].path

    async def prune(self, keep: Iterable[int], *, also: Iterable[Path] = ()) -> None:
        """Removes all folders except the kept versions, their chains, and `also`."""
        kept = [version for version in keep if version in self.records]
        # A folder being rebuilt for an engine is registered only when complete.
        async with self._rebuilding:
            paths = {link.path for version in kept for link in self.chain(version)}
            paths |= {self._rebuilt[version] for version in kept if version in self._rebuilt}
            await self._files.prune_models([*paths, *also])

    def equal(self, sha256: str) -> VersionRecord | None:
        """Returns the first version with the same weights."""
        return next((record for record in self.records.values() if sha256 and record.sha256 == sha256), None)


def _based(saved: SavedModel, base: VersionRecord | None) -> SavedModel:
    return replace(saved, base=base.version if base and saved.kind is WeightsKind.DELTA else 0)
