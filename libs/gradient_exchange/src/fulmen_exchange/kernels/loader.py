"""Finds the compiled library of the kernels, or compiles it for this CPU and caches it.

The library has a plain C interface: it needs no torch headers and works with every version. Its file name contains a digest
of source, flags and processor, so that machines can share a folder, and a digest of its own bytes, so that a damaged one
is ignored. The compiler is not part of the name, so a machine without one can use a library compiled elsewhere. A wheel
built with a compiler contains a library for all processors of its kind (`compile_portable`).
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

SOURCE = Path(__file__).with_name("native.cpp")
PREBUILT = Path(__file__).with_name("prebuilt")
"""Libraries compiled when the package was built, as trustworthy as this file."""
PROCESSOR = Path("/proc/cpuinfo")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""None of them changes a result: contraction would, and is off; the last two only allow `floor` to be one instruction."""
FOR_THIS_PROCESSOR = "-march=native"
PORTABLE_FEATURES = {"x86_64": "avx2"}
"""By machine, a feature that nearly all its processors have and that kernels need to be fast; named as in /proc/cpuinfo and in
the compiler's flags.
"""
DEADLINE_S = 60.0
"""Timeout for compiling, which takes about a second, and for waiting for another process that compiles."""
_POLL_S = 0.02
_OTHERS_WRITE = 0o022
_IDENTIFYING = (
    "vendor_id",
    "cpu family",
    "model",
    "stepping",
    "flags",
    "CPU implementer",
    "CPU variant",
    "CPU part",
    "Features",
)
"""Lines of /proc/cpuinfo that determine the instruction set and the compiler's tuning."""


class KernelsUnavailable(Exception):
    """Compiled kernels are unavailable. The message has the reason and the remedy."""


def cache_folder() -> Path:
    """Returns the cache folder: `fulmen/kernels` in XDG_CACHE_HOME or ~/.cache.

    Raises:
        KernelsUnavailable: if there is no home directory.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise KernelsUnavailable("no home directory; set XDG_CACHE_HOME to a folder for libraries") from error
    return home / "fulmen" / "kernels"


def load(
    folder: Path, *, path: str | None = None, deadline_s: float = DEADLINE_S, prebuilt: Path = PREBUILT
) -> ctypes.CDLL:
    """Loads the package's own library, or the one in a folder, compiling it if there is none.

    If several processes do so at the same time, one compiles and the others wait.

    Args:
        folder: Cache folder; created if missing.
        path: Search path for a compiler; PATH if None.
        deadline_s: Timeout in seconds, for compiling or waiting.
        prebuilt: Folder of the package's own library.

    Raises:
        KernelsUnavailable: if there is no library and none can be compiled.
    """
    key = _key(_processor())
    try:
        for library in _intact(prebuilt, _key(_portable_target())) if _has_portable_features() else ():
            with suppress(OSError):  # incompatible C library
                return ctypes.CDLL(str(library))
        own = _trusted(folder, key)
        if own is None:
            compiler, until = _compiler(path), monotonic() + deadline_s
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(folder, until):
                own = _trusted(folder, key) or _compile(folder, key, compiler, (FOR_THIS_PROCESSOR,), until)
        return ctypes.CDLL(str(own))
    except OSError as error:
        raise KernelsUnavailable(f"cannot store a library in {folder} or load it: {error}") from error


def compile_portable(folder: Path, *, path: str | None = None, deadline_s: float = DEADLINE_S) -> Path:
    """Compiles a library for all processors of this kind with its `PORTABLE_FEATURES`; returns its file.

    Raises:
        KernelsUnavailable: if there is no compiler, or it fails.
    """
    feature = PORTABLE_FEATURES.get(platform.machine())
    flags = (f"-m{feature}",) if feature else ()
    return _compile(folder, _key(_portable_target()), _compiler(path), flags, monotonic() + deadline_s)


def _key(target: str) -> str:
    parts = (SOURCE.read_bytes(), repr(FLAGS).encode(), target.encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _portable_target() -> str:
    machine = platform.machine()
    return f"{platform.system()} {machine} {PORTABLE_FEATURES.get(machine, '')}"


def _has_portable_features() -> bool:
    feature = PORTABLE_FEATURES.get(platform.machine())
    return feature is None or feature in _processor().split()


def _processor() -> str:
    """Describes the processor: a library for another one may use instructions that this one lacks."""
    try:
        lines = PROCESSOR.read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        lines = [f"model name: {platform.processor()}"]
    return "\n".join(
        [platform.system(), platform.machine(), *(line for line in lines if line.startswith(_IDENTIFYING))]
    )


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def _intact(folder: Path, key: str) -> Iterator[Path]:
    """Yields the libraries of a key whose bytes match their names."""
    for library in sorted(folder.glob(f"{key}-*.so")):
        if library.stem == f"{key}-{_checksum(library)}":
            yield library


def _trusted(folder: Path, key: str) -> Path | None:
    """Returns a library of a key that no other user can have written, since its code will run in this process."""
    for library in _intact(folder, key):
        status = library.stat()
        if status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_WRITE:
            return library
    return None


def _compiler(path: str | None) -> str:
    for name in COMPILERS:
        if found := shutil.which(name, path=path):
            return found
    raise KernelsUnavailable(
        f"no C++ compiler found ({', '.join(COMPILERS)}); install one (Debian: apt-get install g++)"
    )


@contextmanager
def _locked(folder: Path, until: float) -> Iterator[None]:
    """Holds the lock of a folder while compiling.

    Raises:
        KernelsUnavailable: if another process holds it beyond the timeout.
    """
    with (folder / "lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if monotonic() > until:
                    raise KernelsUnavailable(
                        f"timed out waiting for another process to compile into {folder}"
                    ) from error
                sleep(_POLL_S)
            except OSError:
                break  # no file locks: two processes may compile, and neither sees a partial library
        yield


def _compile(folder: Path, key: str, compiler: str, processor: Sequence[str], until: float) -> Path:
    """Compiles into a scratch folder and renames, so that no process sees a partial library."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as scratch:
        made, log = Path(scratch) / "made.so", Path(scratch) / "log"
        # Some compilers do not support -march=native.
        for flags in ((*FLAGS, *processor), FLAGS):
            status = _run([compiler, *flags, str(SOURCE), "-o", str(made)], log, until)
            if status == 0:
                made.chmod(0o755)
                return made.replace(folder / f"{key}-{_checksum(made)}.so")
        output = log.read_text(encoding="utf-8", errors="replace").strip()[-500:]
    raise KernelsUnavailable(f"{compiler} exited with status {status}: {output}")


def _run(command: Sequence[str], log: Path, until: float) -> int:
    # To a file: reading a pipe would block beyond the timeout while the compiler's children hold it.
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            return process.wait(max(0.0, until - monotonic()))
        except subprocess.TimeoutExpired as error:
            raise KernelsUnavailable(f"{command[0]} timed out") from error
        finally:
            # Kill its children too: `c++` is only a driver.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
