"""Finds a compiled library of the proxy, or compiles it and keeps it.

As for the gradient exchange's kernels (decision 13), the library has a plain C interface and is called through ctypes. It is
loaded from the wheel, if that was built with a compiler, otherwise from the user's cache, where the first process that needs
it compiles it. A file's name holds a digest of source, flags and machine, and one of its own bytes, so that a damaged file
is ignored. Several processes may compile at the same time: each renames a complete file.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREBUILT = Path(__file__).with_name("prebuilt")
"""Libraries compiled when the package was built, as trustworthy as this file."""
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti")
DEADLINE_S = 60.0
_OTHERS_WRITE = 0o022


class LibraryUnavailable(Exception):
    """A library is unavailable. The message says why and what would help."""


def cache_folder() -> Path:
    """Returns the cache folder: `fulmen/proxy` in XDG_CACHE_HOME or ~/.cache.

    Raises:
        LibraryUnavailable: if there is no home directory.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise LibraryUnavailable("no home directory; set XDG_CACHE_HOME to a folder for libraries") from error
    return home / "fulmen" / "proxy"


def open_library(source: Path, folder: Path, *, prebuilt: Path = PREBUILT, path: str | None = None) -> ctypes.PyDLL:
    """Opens the library of a source; its functions run under the interpreter's lock.

    Args:
        source: C++ file with a C interface.
        folder: cache folder; created if missing.
        prebuilt: folder of the package's own libraries.
        path: search path for a compiler; PATH if None.

    Raises:
        LibraryUnavailable: if there is none and it cannot be compiled.
    """
    try:
        key = _key(source)
        for library in _intact(prebuilt, key):
            return ctypes.PyDLL(str(library))
        library = next(filter(_is_own, _intact(folder, key)), None) or compile_library(source, folder, path=path)
        return ctypes.PyDLL(str(library))
    except OSError as error:
        raise LibraryUnavailable(f"cannot store a library in {folder} or load it: {error}") from error


def compile_library(source: Path, folder: Path, *, path: str | None = None) -> Path:
    """Compiles a source into a folder; returns the library.

    Raises:
        LibraryUnavailable: if there is no compiler, or it fails.
        OSError: if the folder cannot be written.
    """
    compiler = next(filter(None, (shutil.which(name, path=path) for name in COMPILERS)), None)
    if compiler is None:
        raise LibraryUnavailable(
            f"no C++ compiler found ({', '.join(COMPILERS)}); install one (Debian: apt-get install g++)"
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as scratch:
        made = Path(scratch) / "made.so"
        command = [compiler, *FLAGS, str(source), "-o", str(made)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired as error:
            raise LibraryUnavailable(f"{compiler} timed out") from error
        if done.returncode:
            raise LibraryUnavailable(f"{compiler} exited with status {done.returncode}: {done.stderr.strip()[-500:]}")
        made.chmod(0o755)
        return made.replace(folder / f"{_key(source)}-{_checksum(made)}.so")


def _key(source: Path) -> str:
    parts = (source.read_bytes(), repr(FLAGS).encode(), platform.system().encode(), platform.machine().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def _intact(folder: Path, key: str) -> Iterator[Path]:
    """Yields the libraries of a key whose bytes match their names."""
    for library in sorted(folder.glob(f"{key}-*.so")):
        if library.stem == f"{key}-{_checksum(library)}":
            yield library


def _is_own(library: Path) -> bool:
    """Returns whether no other user can have written a library, since its code will run in this process."""
    status = library.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_WRITE
