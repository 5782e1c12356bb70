"""The algorithms by name: of this package, of installed packages, and of the files in the service's settings.

Each file lists its algorithms in `ENTRIES`.
"""

import hashlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from fulmen_algorithm import algorithms
from fulmen_algorithm.runs.algorithm import AlgorithmEntry, AlgorithmSettings, Registry, RunSettings

ENTRIES = "ENTRIES"
ENTRY_POINTS = "fulmen.algorithms"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


class AlgorithmsInvalid(Exception):
    """An algorithm cannot be loaded; the text names its file or package."""


def load_registry(files: Iterable[Path] = ()) -> Registry:
    """Loads all algorithms.

    Args:
        files: Python files with `ENTRIES`, such as those of `FULMEN_ALGORITHM_MODULES`.

    Raises:
        AlgorithmsInvalid: if a file cannot be loaded or has no entries, or two algorithms have the same name.
    """
    found: dict[str, AlgorithmEntry[Any]] = {}
    origins: dict[str, str] = {}
    for origin, entry in _all(files):
        if entry.name in found:
            raise AlgorithmsInvalid(
                f"{origin}: the algorithm {entry.name!r} is already defined in {origins[entry.name]}"
            )
        found[entry.name], origins[entry.name] = entry, origin
    return found


def _all(files: Iterable[Path]) -> Iterator[tuple[str, AlgorithmEntry[Any]]]:
    for module in pkgutil.walk_packages(algorithms.__path__, f"{algorithms.__name__}."):
        # A module without entries is a part of others.
        loaded = import_module(module.name) if module.name != __name__ else None
        if hasattr(loaded, ENTRIES):
            yield from ((module.name, entry) for entry in _entries(module.name, loaded))
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
        origin = f"entry point {point.name} = {point.value}"
        try:
            loaded = point.load()
        except Exception as error:  # other people's code, which may raise anything
            raise AlgorithmsInvalid(f"{origin}: {type(error).__name__}: {error}") from error
        yield from ((origin, entry) for entry in _entries(origin, loaded))
    for path in files:
        yield from ((str(path), entry) for entry in _entries(str(path), _module(path)))


def _entries(origin: str, module: object) -> tuple[AlgorithmEntry[Any], ...]:
    """Returns the entries of a module, or of an entry point that is a list of entries.

    Raises:
        AlgorithmsInvalid: if the module has no valid `ENTRIES`.
    """
    entries = getattr(module, ENTRIES, None) if isinstance(module, ModuleType) else module
    if isinstance(entries, AlgorithmEntry):
        entries = (entries,)
    if not isinstance(entries, tuple) or not entries or not all(isinstance(e, AlgorithmEntry) for e in entries):
        raise AlgorithmsInvalid(f"{origin}: needs {ENTRIES}, a tuple of AlgorithmEntry")
    for entry in entries:
        if not _NAME.fullmatch(entry.name):
            raise AlgorithmsInvalid(f"{origin}: {entry.name!r} must be 1 to 63 of [a-z0-9_], beginning with a letter")
        base = AlgorithmSettings if entry.trains else RunSettings
        if not (isinstance(entry.settings, type) and issubclass(entry.settings, base)):
            raise AlgorithmsInvalid(f"{origin}: the settings of {entry.name!r} must be a class of {base.__name__}")
    return entries


def _module(path: Path) -> ModuleType:
    """Loads a file as a module with a unique name.

    Raises:
        AlgorithmsInvalid: if it does not exist, or its code raises.
    """
    if not path.is_file():
        raise AlgorithmsInvalid(f"{path}: no such file")
    # A unique name, so that two files called algorithm.py are two modules.
    name = f"fulmen_algorithm_file_{path.stem}_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AlgorithmsInvalid(f"{path}: is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # other people's code, which may raise anything
        del sys.modules[name]
        raise AlgorithmsInvalid(f"{path}: {type(error).__name__}: {error}") from error
    return module
