"""The models that clients have uploaded: a folder for each project and digest, which never changes.

    {project}/{digest}/…             files of a model, and its record `.model.json`
    {project}/.aliases/{alias}       the digest that an alias means
    {project}/.uploads/{digest}/     an upload: `manifest.json`, and below `files` what has arrived (`uploads`)

Invariants: a model is complete, durable and compared with its digest before it has its name, by one rename; it is stored
once per project; only its project's name leads to it. Everything is in files, so services that share the folder agree,
and a killed one loses nothing. All methods block.
"""

import contextlib
import json
import os
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from fulmen.errors import ModelExists, QuotaExceeded
from fulmen.ids import uuid7
from fulmen.models.files import DIGEST, ModelFile
from fulmen_algorithm.models.names import ModelName, unknown
from fulmen_algorithm.persistence.files import replace_file
from fulmen_algorithm.training.files import appear, sync

RECORD: Final = ".model.json"
ALIASES: Final = ".aliases"
UPLOADS: Final = ".uploads"
_REMOVED: Final = ".removed-"
MAX_ALIASES: Final = 2000
"""Maximum number of aliases of a project; all are read when a model is looked up."""
KEPT_FILES: Final = 100_000
"""Maximum number of files in the records that are kept in memory, about 25 MB."""
_USE_TIME_STEP_S: Final = 3600.0
_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A model.

    Attributes:
        name: Its project and digest.
        aliases: Further ids.
        files: The manifest, ordered by path.
        created_s: Unix time of the commit.
        used_s: Unix time of the last use, within an hour.
    """

    name: ModelName
    aliases: tuple[str, ...]
    files: tuple[ModelFile, ...]
    created_s: float
    used_s: float

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return size_of(self.files)


class ModelStore:
    """The models of all projects."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Creates no folder yet. `clock` returns Unix time, in seconds."""
        self.folder = folder
        self.clock = clock
        self._records: OrderedDict[Path, dict[str, Any]] = OrderedDict()
        self._keeping = threading.Lock()

    def place(self, project: str) -> Path:
        """Returns the folder of a project's models."""
        return self.folder / project.rpartition("/")[2]

    def projects(self) -> list[str]:
        """Lists the projects that have a folder."""
        return [f"projects/{path.name}" for path in _entries(self.folder)]

    def listed(self, project: str) -> list[StoredModel]:
        """Lists the models of a project, newest first."""
        aliases = self._aliases(project)
        found = []
        for path in _entries(self.place(project)):
            if DIGEST.fullmatch(path.name):
                # Another call, or another service, may delete it meanwhile.
                with contextlib.suppress(FileNotFoundError):
                    found.append(self._read(ModelName(project=project, id=path.name), aliases))
        return sorted(found, key=lambda each: (-each.created_s, each.name.id))

    def has(self, name: ModelName) -> bool:
        """Returns whether there is a model of a digest."""
        return (self.place(name.project) / name.id / RECORD).exists()

    def find(self, name: ModelName) -> StoredModel:
        """Returns a model by digest or alias.

        Raises:
            ModelNotFound: if there is none.
        """
        aliases = self._aliases(name.project)
        digest = name.id if DIGEST.fullmatch(name.id) else aliases.get(name.id, "")
        try:
            return self._read(ModelName(project=name.project, id=digest or "none"), aliases)
        except (FileNotFoundError, NotADirectoryError):
            raise unknown(name) from None

    def use(self, name: ModelName) -> tuple[StoredModel, Path]:
        """Returns a model and its folder, and notes that it is used.

        Raises:
            ModelNotFound: if there is none.
        """
        model = self.find(name)
        path = self.place(name.project) / model.name.id
        if self.clock() - model.used_s > _USE_TIME_STEP_S:
            self._touch(path / RECORD)
        return model, path

    def add(self, name: ModelName, folder: Path, files: Sequence[ModelFile]) -> None:
        """Makes a folder with all files of a manifest a model, unless it is one."""
        record = {"files": [asdict(file) for file in files], "created_s": self.clock()}
        replace_file(folder / RECORD, json.dumps(record).encode())
        self._touch(folder / RECORD)
        target = self.place(name.project) / name.id
        if target.exists():
            return
        try:
            appear(folder, target)
        except OSError:
            # Another service was faster.
            if not target.exists():
                raise

    def alias(self, name: ModelName, alias: str) -> None:
        """Gives a model an alias.

        Raises:
            ModelExists: if the alias belongs to another model.
        """
        self.check_alias(name, alias)
        folder = self.place(name.project) / ALIASES
        folder.mkdir(parents=True, exist_ok=True)
        aside = folder / f".{uuid7()}"
        replace_file(aside, name.id.encode())
        try:
            os.link(aside, folder / alias)
        except FileExistsError:
            # It belongs to this model or to a deleted one, or was taken a moment ago.
            self.check_alias(name, alias)
            aside.rename(folder / alias)
        finally:
            aside.unlink(missing_ok=True)
        sync(folder)

    def check_alias(self, name: ModelName, alias: str) -> None:
        """Checks that an alias belongs to this model or to none.

        Raises:
            ModelExists: if it does not.
            QuotaExceeded: if it is new, and the project has too many.
        """
        known = self._aliases(name.project)
        if alias not in known and len(known) >= MAX_ALIASES:
            raise QuotaExceeded(
                f"{name.project} has {MAX_ALIASES} aliases of models, which is the maximum. Delete models that are not needed.",
                project=name.project,
                quota="model_aliases",
            )
        if known.get(alias, name.id) != name.id:
            raise ModelExists(
                f"The alias {alias} belongs to another model. Choose another one, or delete that model.", alias=alias
            )

    def delete(self, model: StoredModel) -> None:
        """Deletes a model and its aliases; returns once it has no name, before its files are deleted."""
        place = self.place(model.name.project)
        self._records.pop(place / model.name.id, None)
        with contextlib.suppress(FileNotFoundError):
            # Under another name first: one that is removed in part must not pass for whole.
            (place / model.name.id).rename(place / f"{_REMOVED}{uuid7()}")
        for alias in model.aliases:
            (place / ALIASES / alias).unlink(missing_ok=True)

    def remove_deleted(self) -> None:
        """Removes the files of deleted models."""
        for project in self.projects():
            for path in _entries(self.place(project)):
                if path.name.startswith(_REMOVED):
                    shutil.rmtree(path, ignore_errors=True)

    def _aliases(self, project: str) -> dict[str, str]:
        """Returns the digests of aliases, without those of deleted models."""
        found, place = dict[str, str](), self.place(project)
        for path in _entries(place / ALIASES):
            with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
                digest = "" if path.name.startswith(".") else path.read_text()
                if DIGEST.fullmatch(digest) and (place / digest).exists():
                    found[path.name] = digest
        return found

    def _read(self, name: ModelName, aliases: dict[str, str]) -> StoredModel:
        path = self.place(name.project) / name.id
        used_s = (path / RECORD).stat().st_mtime
        record = self._records.get(path)
        if record is None:
            try:
                record = json.loads((path / RECORD).read_bytes())
                record |= {"files": tuple(ModelFile(**file) for file in record["files"])}
                record |= {"created_s": float(record["created_s"])}
            except (ValueError, LookupError, TypeError) as error:
                # As if it were gone: its files stay, for a person to repair, and other models are served.
                _log.error("model_record_damaged", model=str(name), error=type(error).__name__)
                raise FileNotFoundError(str(path / RECORD)) from error
            self._keep(path, record)
        return StoredModel(
            name=name,
            aliases=tuple(sorted(alias for alias, digest in aliases.items() if digest == name.id)),
            files=record["files"],
            created_s=record["created_s"],
            used_s=used_s,
        )

    def _keep(self, path: Path, record: dict[str, Any]) -> None:
        with self._keeping:
            self._records[path] = record
            while sum(len(each["files"]) for each in self._records.values()) > KEPT_FILES:
                self._records.popitem(last=False)

    def _touch(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(path, (self.clock(), self.clock()))


def size_of(files: Sequence[ModelFile]) -> int:
    """Returns the size of files, in bytes."""
    return sum(file.size_bytes for file in files)


def _entries(folder: Path) -> Iterator[Path]:
    """Yields the entries of a folder; none if there is no folder."""
    try:
        yield from sorted(folder.iterdir())
    except FileNotFoundError:
        return
