"""Uploads of models: what has arrived of which file, in the folder of a project (`model_store`).

Invariants: bytes are acknowledged only when they are durable; a file has its own name only if it is complete and has its
SHA-256; what is not, ends with `.part`, which no file of a model does. All methods of `Uploads` block.
"""

import asyncio
import contextlib
import json
import os
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import structlog

from fulmen.errors import ArgumentInvalid, QuotaExceeded, UploadIncomplete, Violation
from fulmen.ids import uuid7
from fulmen.models.files import DIGEST, ModelFile, alias_problem, manifest_digest, manifest_problems
from fulmen_algorithm.models.file_writer import FileWriter, arrived
from fulmen_algorithm.models.model_store import UPLOADS, ModelStore, StoredModel, size_of
from fulmen_algorithm.models.names import ModelName, unknown
from fulmen_algorithm.persistence.files import replace_file
from fulmen_algorithm.training.files import appear

MANIFEST: Final = "manifest.json"
FILES: Final = "files"
MAX_UPLOADS: Final = 32
MAX_MODELS: Final = 1000
MAX_PROJECT_FILES: Final = 50_000
"""Maximum number of files in the models and uploads of a project: empty ones take no bytes, but they take inodes."""
_REPORTED: Final = 50
SWEEP_INTERVAL_S: Final = 60.0

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadLimits:
    """Limits of uploads.

    Attributes:
        max_bytes: Size of one model.
        quota_bytes: Size of all models and uploads of a project.
        idle_s: Time without data after which an upload is removed, in seconds.
        keep_s: Time after which a model that is not used is removed, in seconds; 0 for none.
    """

    max_bytes: int
    quota_bytes: int
    idle_s: float
    keep_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An upload that was begun: its name, the files that are not complete with what has arrived, and when it expires.

    `model` is set if it is committed already.
    """

    name: ModelName
    missing: tuple[tuple[ModelFile, int], ...] = ()
    model: StoredModel | None = None
    expires_s: float = 0.0

    @property
    def unfinished(self) -> list[str]:
        """Paths of the missing files of which all bytes have arrived; see `Uploads.complete`."""
        return [file.path for file, size_bytes in self.missing if size_bytes == file.size_bytes]


class Uploads:
    """The uploads of all projects."""

    def __init__(self, models: ModelStore, limits: UploadLimits) -> None:
        self._models = models
        self._limits = limits
        self._locks: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._manifests: dict[Path, dict[str, ModelFile]] = {}

    def begin(self, project: str, files: Sequence[ModelFile], alias: str) -> Begun:
        """Begins an upload, or continues it.

        Raises:
            ArgumentInvalid: with every problem of the manifest.
            ModelExists: if the alias belongs to another model.
            QuotaExceeded: if the project has no room for it.
        """
        _check(files, alias)
        files = sorted(files, key=lambda file: file.path)
        name = ModelName(project=project, id=manifest_digest(files), is_upload=True)
        # Two that begin at the same time must not both find room.
        with self._locks[project]:
            if alias:
                self._models.check_alias(name, alias)
            known = {model.name.id: model for model in self._models.listed(project)}
            if name.id in known:
                return Begun(name=name, model=known[name.id])
            folder = self._folder(name)
            if not (folder / MANIFEST).exists():
                self._check_room(project, files, known.values())
                self._create(folder, files, known.values())
            self._touch(folder)
            missing = tuple(_missing(folder, files))
            return Begun(name=name, missing=missing, expires_s=self._models.clock() + self._limits.idle_s)

    def writer(self, name: ModelName, path: str) -> FileWriter:
        """Opens a file of an upload, to continue it.

        Raises:
            ModelNotFound: if there is no such upload; it may have expired or be committed.
            ArgumentInvalid: if it has no such file.
        """
        folder = self._folder(name)
        file = self._manifest(name).get(path)
        if file is None:
            raise _invalid("path", "is not in the manifest of the upload")
        self._touch(folder)
        try:
            return FileWriter(folder / FILES / path, file, touch=lambda: self._touch(folder))
        except FileNotFoundError:
            raise unknown(name) from None

    def complete(self, name: ModelName, paths: Sequence[str]) -> None:
        """Completes files of which all bytes have arrived, where the stream that brought them ended before it could.

        Reads the files.

        Raises:
            ModelNotFound: if there is no such upload.
            UploadDamaged: if a file does not have its SHA-256; its bytes are dropped.
        """
        for path in paths:
            with contextlib.closing(self.writer(name, path)) as writer:
                writer.finish()

    def commit(self, name: ModelName, alias: str) -> StoredModel:
        """Makes a complete upload a model.

        Raises:
            ModelNotFound: if there is neither such an upload nor such a model.
            UploadIncomplete: if files are missing.
            ModelExists: if the alias belongs to another model.
        """
        if alias and (problem := alias_problem(alias)):
            raise _invalid("alias", problem)
        model, folder = ModelName(project=name.project, id=name.id), self._folder(name)
        with self._locks[name.project]:
            if alias:
                self._models.check_alias(model, alias)
            if not self._models.has(model):
                files = [*self._manifest(name).values()]
                _check_complete(_missing(folder, files))
                self._models.add(model, folder / FILES, files)
            self._remove(folder)
            if alias:
                self._models.alias(model, alias)
            return self._models.use(model)[0]

    def delete(self, name: ModelName) -> None:
        """Removes an upload; does nothing if there is none."""
        with self._locks[name.project]:
            self._remove(self._folder(name))

    def sweep(self, is_used: Callable[[StoredModel], bool]) -> None:
        """Removes uploads that are idle, and models that are not used; `is_used` returns whether a run needs one."""
        now_s = self._models.clock()
        for project in self._models.projects():
            for folder in self._open(project):
                with contextlib.suppress(FileNotFoundError), self._locks[project]:
                    if now_s - (folder / MANIFEST).stat().st_mtime > self._limits.idle_s:
                        self._remove(folder)
            for model in self._models.listed(project) if self._limits.keep_s else ():
                if now_s - model.used_s > self._limits.keep_s and not is_used(model):
                    self._models.delete(model)
        self._models.remove_deleted()

    def count(self) -> int:
        """Returns the number of uploads that are not committed."""
        return sum(len(self._open(project)) for project in self._models.projects())

    def _open(self, project: str) -> list[Path]:
        folder = self._models.place(project) / UPLOADS
        return [path for path in sorted(folder.iterdir()) if DIGEST.fullmatch(path.name)] if folder.is_dir() else []

    def _folder(self, name: ModelName) -> Path:
        if not DIGEST.fullmatch(name.id):
            raise unknown(name)
        return self._models.place(name.project) / UPLOADS / name.id

    def _manifest(self, name: ModelName) -> dict[str, ModelFile]:
        try:
            return self._read(self._folder(name))
        except FileNotFoundError:
            raise unknown(name) from None

    def _read(self, folder: Path) -> dict[str, ModelFile]:
        """Reads the manifest of an upload: the meaning of a digest never changes."""
        if not (folder / MANIFEST).exists():
            self._manifests.pop(folder, None)
        if folder not in self._manifests:
            listed = [ModelFile(**file) for file in json.loads((folder / MANIFEST).read_bytes())]
            self._manifests[folder] = {file.path: file for file in listed}
        return self._manifests[folder]

    def _touch(self, folder: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(folder / MANIFEST, (self._models.clock(), self._models.clock()))

    def _remove(self, folder: Path) -> None:
        self._manifests.pop(folder, None)
        # Its manifest first: what is removed in part must not pass for an upload.
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def _check_room(self, project: str, files: Sequence[ModelFile], models: Collection[StoredModel]) -> None:
        limits, size_bytes, uploads = self._limits, size_of(files), self._open(project)
        if size_bytes > limits.max_bytes:
            raise _exceeded(
                "upload_bytes", f"A model may have {limits.max_bytes} bytes, this one has {size_bytes}", project
            )
        taken = sum(model.size_bytes for model in models)
        taken += sum(size_of([*self._read(folder).values()]) for folder in uploads)
        if taken + size_bytes > limits.quota_bytes:
            text = f"Models of {project} may have {limits.quota_bytes} bytes, and {taken} are in use; this one has {size_bytes}"
            raise _exceeded("model_bytes", text, project)
        count = len(files) + sum(len(model.files) for model in models) + sum(len(self._read(each)) for each in uploads)
        if count > MAX_PROJECT_FILES:
            text = f"Models of {project} may have {MAX_PROJECT_FILES} files together; with this one they have {count}"
            raise _exceeded("model_files", text, project)
        if len(models) >= MAX_MODELS:
            raise _exceeded("models", f"{project} has {MAX_MODELS} models, which is the maximum", project)
        if len(uploads) >= MAX_UPLOADS:
            raise _exceeded("uploads", f"{project} has {MAX_UPLOADS} uploads that are not committed", project)

    def _create(self, folder: Path, files: Sequence[ModelFile], models: Collection[StoredModel]) -> None:
        """Makes the folder of an upload, with the files that other models of the project have."""
        self._remove(folder)
        aside = folder.with_name(f".new-{uuid7()}")
        try:
            (aside / FILES).mkdir(parents=True)
            for file in files:
                place = aside / FILES / file.path
                place.parent.mkdir(parents=True, exist_ok=True)
                if not file.size_bytes:
                    place.touch()
                for same in self._same(file, models):
                    # On a file system without links it is sent again.
                    with contextlib.suppress(OSError):
                        place.hardlink_to(same)
                        break
            replace_file(aside / MANIFEST, json.dumps([asdict(file) for file in files]).encode())
            appear(aside, folder)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def _same(self, file: ModelFile, models: Collection[StoredModel]) -> Iterator[Path]:
        for model in models:
            for each in model.files:
                if each.sha256 == file.sha256 and each.size_bytes == file.size_bytes > 0:
                    yield self._models.place(model.name.project) / model.name.id / each.path


class ModelSweeper:
    """Background role: removes uploads that are idle, and models that were not used for their retention time."""

    def __init__(self, uploads: Uploads, *, used_by: Callable[[StoredModel], str]) -> None:
        """`used_by` returns the run that needs a model; empty if none does."""
        self._uploads = uploads
        self._used_by = used_by

    async def run(self) -> None:
        """Sweeps until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self._uploads.sweep, lambda model: bool(self._used_by(model)))
            except OSError as error:
                # Full or unreachable for now; operations that need the storage report it.
                _log.warning("models_not_swept", error=error.strerror)
            await asyncio.sleep(SWEEP_INTERVAL_S)


def _missing(folder: Path, files: Sequence[ModelFile]) -> Iterator[tuple[ModelFile, int]]:
    for file in files:
        place = folder / FILES / file.path
        if not place.exists():
            yield file, arrived(place)


def _check(files: Sequence[ModelFile], alias: str) -> None:
    problems = manifest_problems(files)
    if alias and (problem := alias_problem(alias)):
        problems.append(Violation(field="alias", description=problem))
    if problems:
        raise ArgumentInvalid("The folder cannot be a model; nothing was begun.", violations=problems)


def _check_complete(missing: Iterator[tuple[ModelFile, int]]) -> None:
    found = [
        Violation(field=file.path, description=f"{size} of {file.size_bytes} bytes have arrived")
        for file, size in missing
    ]
    if len(found) > _REPORTED:
        found = [
            *found[:_REPORTED],
            Violation(field="", description=f"{len(found) - _REPORTED} more files are missing"),
        ]
    if found:
        raise UploadIncomplete("The upload is not complete: send what is missing, then commit it.", violations=found)


def _exceeded(quota: str, text: str, project: str) -> QuotaExceeded:
    hint = "An operator can raise the limit (docs/weights.md); models that are not needed can be deleted."
    return QuotaExceeded(f"{text}. {hint}", project=project, quota=quota)


def _invalid(field: str, description: str) -> ArgumentInvalid:
    return ArgumentInvalid("The request is malformed.", violations=[Violation(field=field, description=description)])
