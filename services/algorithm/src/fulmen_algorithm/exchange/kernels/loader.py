"""Compiles the kernels for the CPU that they run on, and keeps the library for the processes that come later.

The library is a plain C one: it needs no headers of torch and fits every version of it. What it is named by is its
source, its flags and the processor, so that machines may share the folder; the compiler is not in the name, so that a
machine without one can use what was compiled before.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("native.cpp")
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
"""Nothing here changes a result: contraction would, and is off; the last two only let `floor` be one instruction."""
FOR_THIS_PROCESSOR = "-march=native"
DEADLINE_S = 60.0
"""For a compiler; it takes about a second."""
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


def load(folder: Path, *, path: str | None = None, deadline_s: float = DEADLINE_S) -> ctypes.CDLL:
    """Loads the library, which is compiled first if the folder has none. Several processes may do so at once.

    Args:
        folder: Where libraries are kept; made if need be.
        path: Folders in which a compiler is looked for; those of PATH if None.
        deadline_s: For the compiler.

    Raises:
        KernelsUnavailable: if it can be neither found nor compiled.
    """
    try:
        library = folder / f"{_name()}.so"
        if _trusted(library):
            try:
                return ctypes.CDLL(str(library))
            except OSError:
                pass  # cut off by a full disk or a lost machine: compiled anew
        _compile(library, _compiler(path), deadline_s)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise KernelsUnavailable(f"no library can be kept in {folder}, or loaded from it: {error}") from error


def _name() -> str:
    parts = (SOURCE.read_bytes(), repr(FLAGS).encode(), _processor().encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


def _processor() -> str:
    """Describes the processor: a library for another one may use instructions that this one lacks."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n")[0].splitlines()
    except OSError:
        lines = [f"model name: {platform.processor()}"]
    return "\n".join([platform.system(), platform.machine(), *(line for line in lines if line.startswith(_TOLD))])


def _trusted(library: Path) -> bool:
    """Tells whether there is a library that nobody else can have written: its code will run in this process."""
    if not library.exists():
        return False
    status = library.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_WRITE


def _compiler(path: str | None) -> str:
    for name in COMPILERS:
        if found := shutil.which(name, path=path):
            return found
    raise KernelsUnavailable(
        f"no C++ compiler was found ({', '.join(COMPILERS)}); install one (Debian: apt-get install g++)"
    )


def _compile(library: Path, compiler: str, deadline_s: float) -> None:
    """Compiles to a folder of its own and renames, so that nobody ever sees half a library."""
    library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as folder:
        made, log = Path(folder) / library.name, Path(folder) / "log"
        # Some compilers know no processor of their own by that name.
        for flags in ((*FLAGS, FOR_THIS_PROCESSOR), FLAGS):
            status = _run([compiler, *flags, str(SOURCE), "-o", str(made)], log, deadline_s)
            if status == 0:
                made.chmod(0o700)
                made.replace(library)
                return
        told = log.read_text(encoding="utf-8", errors="replace").strip()[-500:]
    raise KernelsUnavailable(f"{compiler} ended with status {status}: {told}")


def _run(command: Sequence[str], log: Path, deadline_s: float) -> int:
    # To a file: a pipe would be waited for even after the deadline, while the compiler's own children hold it.
    with log.open("wb") as output:
        try:
            return subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=deadline_s, check=False
            ).returncode
        except subprocess.TimeoutExpired as error:
            raise KernelsUnavailable(f"{command[0]} took more than {deadline_s:.0f} s") from error
