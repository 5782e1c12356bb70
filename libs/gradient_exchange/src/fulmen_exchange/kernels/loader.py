"""Finds a library of the kernels, or compiles it for the CPU that it runs on and keeps it for the processes that come later.

The library is a plain C one: it needs no headers of torch and fits every version of it. What it is named by is its
source, its flags and the processor, so that machines may share a folder, and its own bytes, so that one that is damaged
is nobody's; the compiler is not in the name, so that a machine without one can use what was compiled elsewhere. A
package that was built where there was a compiler brings one for every processor of its kind (`compile_portable`).
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
"""What was compiled when the package was built; whoever may write there may write this file."""
PROCESSOR = Path("/proc/cpuinfo")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""Nothing here changes a result: contraction would, and is off; the last two only let `floor` be one instruction."""
FOR_THIS_PROCESSOR = "-march=native"
PORTABLE_FEATURES = {"x86_64": "avx2"}
"""By machine, what its processors have nearly all, and need to be quick; the name is that of /proc/cpuinfo and of a flag."""
DEADLINE_S = 60.0
"""For a compiler; it takes about a second. Who waits for another process' compiler waits no longer in all."""
_POLL_S = 0.02
_OTHERS_WRITE = 0o022
_TOLD = (
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
"""Lines of /proc/cpuinfo that say which instructions there are, and what a compiler would choose among them."""


class KernelsUnavailable(Exception):
    """Compiled kernels cannot be had; the text says why, and what would help."""


def cache_folder() -> Path:
    """Returns where libraries are kept: `fulmen/kernels` in XDG_CACHE_HOME or ~/.cache.

    Raises:
        KernelsUnavailable: if there is no home directory.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError as error:
        raise KernelsUnavailable("there is no home directory; XDG_CACHE_HOME names a folder for libraries") from error
    return home / "fulmen" / "kernels"


def load(
    folder: Path, *, path: str | None = None, deadline_s: float = DEADLINE_S, prebuilt: Path = PREBUILT
) -> ctypes.CDLL:
    """Loads the library that the package brings; else that of a folder, which is compiled first if there is none.

    Several processes may do so at once: one compiles, the others wait for it.

    Args:
        folder: Where libraries are kept; made if need be.
        path: Folders in which a compiler is looked for; those of PATH if None.
        deadline_s: For the compiler.
        prebuilt: Where the package has its own.

    Raises:
        KernelsUnavailable: if it can be neither found nor compiled.
    """
    key = _key(_processor())
    try:
        for library in _whole(prebuilt, _key(_portable_target())) if _has_portable_features() else ():
            with suppress(OSError):  # where the system's C library is another than it was built with
                return ctypes.CDLL(str(library))
        own = _own(folder, key)
        if own is None:
            compiler, until = _compiler(path), monotonic() + deadline_s
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _alone(folder, until):
                own = _own(folder, key) or _compile(folder, key, compiler, (FOR_THIS_PROCESSOR,), until)
        return ctypes.CDLL(str(own))
    except OSError as error:
        raise KernelsUnavailable(f"no library can be kept in {folder}, or loaded from it: {error}") from error


def compile_portable(folder: Path, *, path: str | None = None, deadline_s: float = DEADLINE_S) -> Path:
    """Compiles a library for all processors of this machine's kind that have its `PORTABLE_FEATURES`; returns its file.

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
    return "\n".join([platform.system(), platform.machine(), *(line for line in lines if line.startswith(_TOLD))])


def _checksum(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def _whole(folder: Path, key: str) -> Iterator[Path]:
    """Yields the libraries of a key whose bytes are those that they were named by."""
    for library in sorted(folder.glob(f"{key}-*.so")):
        if library.stem == f"{key}-{_checksum(library)}":
            yield library


def _own(folder: Path, key: str) -> Path | None:
    """Returns a library of a key that nobody else can have written, if there is one: its code will run in this process."""
    for library in _whole(folder, key):
        status = library.stat()
        if status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_WRITE:
            return library
    return None


def _compiler(path: str | None) -> str:
    for name in COMPILERS:
        if found := shutil.which(name, path=path):
            return found
    raise KernelsUnavailable(
        f"no C++ compiler was found ({', '.join(COMPILERS)}); install one (Debian: apt-get install g++)"
    )


@contextmanager
def _alone(folder: Path, until: float) -> Iterator[None]:
    """Keeps the other processes that would compile into a folder waiting, and waits for them.

    Raises:
        KernelsUnavailable: if another one is not done in time.
    """
    with (folder / "lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if monotonic() > until:
                    raise KernelsUnavailable(f"another process has not done compiling into {folder}") from error
                sleep(_POLL_S)
            except OSError:
                break  # a file system without locks: two may compile, and neither sees half of the other's library
        yield


def _compile(folder: Path, key: str, compiler: str, processor: Sequence[str], until: float) -> Path:
    """Compiles to a folder of its own and renames, so that nobody ever sees half a library."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as scratch:
        made, log = Path(scratch) / "made.so", Path(scratch) / "log"
        # Some compilers know no processor of their own by that name.
        for flags in ((*FLAGS, *processor), FLAGS):
            status = _run([compiler, *flags, str(SOURCE), "-o", str(made)], log, until)
            if status == 0:
                made.chmod(0o755)
                return made.replace(folder / f"{key}-{_checksum(made)}.so")
        told = log.read_text(encoding="utf-8", errors="replace").strip()[-500:]
    raise KernelsUnavailable(f"{compiler} ended with status {status}: {told}")


def _run(command: Sequence[str], log: Path, until: float) -> int:
    # To a file: a pipe would be waited for even after the deadline, while the compiler's own children hold it.
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            return process.wait(max(0.0, until - monotonic()))
        except subprocess.TimeoutExpired as error:
            raise KernelsUnavailable(f"{command[0]} took too long") from error
        finally:
            # With its children: what `c++` names is but the driver of a compiler.
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
