"""Builds the launch of a child that runs code of a tenant: the one mechanism of runner and algorithm service.

Invariant: from `process` on, a child has no variable, descriptor or memory of the service, cannot gain privileges, and is
limited; where the service may change users, it has a user of its own. From `sandbox` on, it sees the files that it is
given and no others, and reaches no process but its own.
"""

import asyncio
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import structlog

from fulmen_service_kit.isolation import confine, enter_sandbox
from fulmen_service_kit.isolation.cgroups import Cgroup, Cgroups
from fulmen_service_kit.isolation.levels import Isolation, IsolationUnavailable
from fulmen_service_kit.isolation.seccomp import filter_program

SCRIPT: Final = Path(confine.__file__)
PROBE_TIMEOUT_S: Final = 20.0
PROCESS_HEADROOM: Final = 64
"""Processes above the limit at which the kernel stops a child, so that its parent can report why it was killed."""

_SYSTEM: Final = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc", "/opt", "/sys", "/nix/store", "/gnu/store",
    "/run/systemd/resolve",
)  # fmt: skip
"""What programs and libraries need to run, and to find other machines."""

_DEVICES: Final = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty")
_FIRST_UID: Final = 1 << 30
_UID_MAP: Final = Path("/proc/self/uid_map")
_log = structlog.get_logger()
_TRUE: Final = (sys.executable, "-I", "-S", "-c", "")

_UNCONFINED: Final[Mapping[str, Any]] = {
    "cgroup_files": (),
    "limits": {},
    "uid": None,
    "is_trusted": False,
    "readable": (),
    "writable": (),
    "filter": "",
    "has_launcher": False,
    "ignores_sigterm": False,
}
"""What `confine` reads; each kind of launch sets what it needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of a child; 0 for none.

    Attributes:
        memory_bytes: Memory of all its processes; kept by the kernel where control groups can be written.
        process_count: Concurrent processes and threads; likewise, or where the child has its own user.
        file_bytes: Size of one file.
        is_measured: Whether the service measures the memory, too; otherwise a process is limited where groups are not.
    """

    memory_bytes: int = 0
    process_count: int = 0
    file_bytes: int = 0
    is_measured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Files that a child is given besides the system's.

    Attributes:
        readable: Files and folders that it may read.
        writable: Folders that it may write.
        folder: Working directory.
    """

    readable: tuple[Path, ...] = ()
    writable: tuple[Path, ...] = ()
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A child that can be started.

    Attributes:
        argv: Program and arguments.
        confinement: Argument of `confine.confine`, to be applied before the program is executed.
        uid: User and group of the child, which must own what it may write; None for the service's.
        needs_home: Whether the child needs a home folder among its writable ones.
        cgroup: Its control groups, to be removed after its end; None without any.
    """

    argv: tuple[str, ...]
    confinement: Mapping[str, Any]
    uid: int | None = None
    needs_home: bool = False
    cgroup: Cgroup | None = None


class Isolator:
    """Launches children at the level that operator and tenant ask for."""

    def __init__(
        self,
        floor: Isolation,
        *,
        setting: str,
        readable: Iterable[Path] = (),
        hidden: Iterable[Path] = (),
    ) -> None:
        """Initializes the isolator. Nothing is tried before it is needed.

        Args:
            floor: The operator's level.
            setting: Name of the setting with that level, for errors.
            readable: Further files that sandboxed children may read.
            hidden: Files that they must not see, even below readable folders.
        """
        self.floor = floor
        self._setting = setting
        self._readable = tuple(readable)
        self._hidden = tuple(path.absolute() for path in hidden)

    def level(self, wish: Isolation | None) -> Isolation:
        """Returns the level of a child: what the tenant asks for, raised to the operator's."""
        return self.floor if wish is None else wish.raised_to(self.floor)

    def launch(self, argv: Sequence[str], level: Isolation, files: Files, bounds: Bounds) -> Launch:
        """Builds the launch of a child on this machine.

        Raises:
            IsolationUnavailable: If the level is not available here, or is the level of containers or Jobs.
            OSError: If its control group cannot be created.
        """
        limits = {"CORE": 0} | ({"FSIZE": bounds.file_bytes} if bounds.file_bytes else {})
        if level is Isolation.TRUSTED:
            return Launch(argv=tuple(argv), confinement={**_UNCONFINED, "limits": limits, "is_trusted": True})
        if level.rank > Isolation.SANDBOX.rank:
            raise IsolationUnavailable(
                f"isolation must be at least `{level}` ({self._setting}): processes on this machine are not allowed"
            )
        if level is Isolation.SANDBOX:
            seen, uid, most = self._seen(files), self._new_uid(), _most_processes(bounds)
            return self._bounded(self._sandbox.launch(argv, seen, limits, uid, most), bounds)
        if self.floor is Isolation.PROCESS and self._process_problem:
            raise IsolationUnavailable(self._process_problem)
        # What only the tenant asks for protects its attempt, not the service, and keeps the service's user if it must.
        uid = None if self._process_problem else self._new_uid()
        return self._bounded(_own_process(argv, limits, uid), bounds)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers that are in force at the operator's level, for logs and status."""
        if self.floor is Isolation.TRUSTED:
            return ()
        if self.floor.rank > Isolation.SANDBOX.rank:
            return (self.floor.value,)
        found = ["minimal environment", "file limits"]
        if sys.platform == "linux":
            found += ["no_new_privs", *(["seccomp"] if filter_program() else [])]
        found.append("own user" if self._changes_users else "the service's user")
        if self.floor is Isolation.SANDBOX:
            found += self._sandbox.layers
        found.append(f"cgroup version {self._cgroups.version}" if self._cgroups else "watched limits")
        return tuple(found)

    @cached_property
    def problem(self) -> str:
        """Why the operator's level is not available on this machine; empty if it is."""
        try:
            if self.floor is Isolation.SANDBOX:
                assert self._sandbox
            elif self.floor is Isolation.PROCESS:
                return self._process_problem
        except IsolationUnavailable as error:
            return str(error)
        return ""

    async def report(self) -> None:
        """Tries the operator's level, and logs which layers are in force or why it is not available."""
        problem = await asyncio.to_thread(lambda: self.problem)
        if problem:
            _log.error("isolation_unavailable", level=self.floor.value, reason=problem)
        else:
            _log.info("isolation", level=self.floor.value, layers=await asyncio.to_thread(lambda: self.layers))

    @cached_property
    def _sandbox(self) -> "_Bubblewrap | _Landlock":
        tried: list[str] = []
        for technique in (_Bubblewrap(), _Landlock()):
            problem = technique.missing or self._problem_of(technique)
            if not problem:
                return technique
            tried.append(f"{technique.name}: {problem}")
        raise IsolationUnavailable(
            f"isolation `sandbox` is not available on this machine ({'; '.join(tried)}). Install bubblewrap and allow user "
            "namespaces, or use a kernel with Landlock (Linux 5.13, `lsm=landlock`); or use containers or Jobs; or set "
            f"{self._setting} to a lower level, which trusts the code more"
        )

    @cached_property
    def _process_problem(self) -> str:
        launch = _own_process(_TRUE, {}, self._new_uid())
        problem = _problem_of(launch, Path("/"))
        if problem:
            return (
                f"isolation `process` is not available on this machine: {problem}. Install Fulmen where other users can read "
                f"it, or set {self._setting}=trusted"
            )
        return ""

    def _problem_of(self, technique: "_Bubblewrap | _Landlock") -> str:
        launch = technique.launch(_TRUE, self._seen(Files(folder=Path("/"))), {}, self._new_uid(), PROCESS_HEADROOM)
        return _problem_of(launch, Path("/"))

    def _seen(self, files: Files) -> Files:
        """Returns the files together with the system's and Python's, without the hidden ones."""
        readable = (*map(Path, _SYSTEM), *_python_folders(), *self._readable)
        seen = dict.fromkeys(_without(path, self._hidden) for path in (*readable, *files.readable))
        return Files(
            readable=tuple(path for paths in seen for path in paths), writable=files.writable, folder=files.folder
        )

    def _bounded(self, launch: Launch, bounds: Bounds) -> Launch:
        """Adds the kernel's limits of memory and processes, where there are any."""
        most = _most_processes(bounds)
        limits = dict(launch.confinement["limits"])
        if most and launch.uid is not None:
            limits["NPROC"] = most
        group = None
        if self._cgroups is not None and (bounds.memory_bytes or most):
            group = self._cgroups.create(memory_bytes=bounds.memory_bytes, process_count=most)
        elif bounds.memory_bytes and not bounds.is_measured:
            limits["DATA"] = bounds.memory_bytes
        files = group.process_files if group is not None else ()
        return Launch(
            argv=launch.argv,
            confinement={**launch.confinement, "limits": limits, "cgroup_files": files},
            uid=launch.uid,
            needs_home=launch.needs_home,
            cgroup=group,
        )

    @cached_property
    def _cgroups(self) -> Cgroups | None:
        return Cgroups.find() if sys.platform == "linux" else None

    @cached_property
    def _changes_users(self) -> bool:
        return os.geteuid() == 0

    def _new_uid(self) -> int | None:
        """Returns a user id that no account has; a new one for each child, so that children cannot reach each other."""
        return self._uids.start + secrets.randbelow(len(self._uids)) if self._changes_users else None

    @cached_property
    def _uids(self) -> range:
        try:
            most = sum(int(line.split()[2]) for line in _UID_MAP.read_text("ascii").splitlines())
        except OSError:
            most = 1 << 16
        # In a container of its own user namespace, few ids exist.
        return range(_FIRST_UID, 2 * _FIRST_UID) if most > 2 * _FIRST_UID else range(most // 2, most)


class _Bubblewrap:
    """Namespaces of users, mounts, processes, IPC and host names, through bubblewrap."""

    name = "bubblewrap"
    layers = ("bubblewrap: read-only files, private /tmp, own processes only",)

    @cached_property
    def _program(self) -> str:
        return shutil.which("bwrap") or ""

    @property
    def missing(self) -> str:
        """What it lacks on this machine; empty if nothing."""
        return "" if self._program else "the program bwrap is not installed"

    def launch(
        self, argv: Sequence[str], files: Files, limits: Mapping[str, int], uid: int | None, most: int
    ) -> Launch:
        """Wraps the program; `most` is its number of processes, 0 for no limit."""
        options = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent"]
        options += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]  # noqa: S108  # Its own.
        # Otherwise bubblewrap makes parents that only its own user may enter.
        parents = dict.fromkeys(p for path in (*files.readable, *files.writable) for p in [*path.parents][-2::-1])
        for parent in parents:
            options += ["--perms", "0755", "--dir", str(parent)]
        for path in files.readable:
            options += ["--ro-bind", str(path), str(path)]
        for path in files.writable:
            options += ["--bind", str(path), str(path)]
        options += ["--remount-ro", "/", "--chdir", str(files.folder)]
        program = filter_program()
        if program:
            options += ["--seccomp", str(confine.SECCOMP_FILE)]
        if uid is None:
            options += ["--unshare-user"]
        else:
            # Root mounts what the child's own user could not reach, and changes the user inside.
            options += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        inside = [sys.executable, "-I", "-S", enter_sandbox.__file__, str(confine.ENVIRONMENT_FILE)]
        # The kernel counts the processes of a user by namespace; with a user of its own, the launch has the limit.
        inside += ["", str(most)] if uid is None else [str(uid), "0"]
        wrapped = (self._program, *options, "--", *inside, *argv)
        # SIGTERM is for the program, not for bubblewrap.
        confinement = {
            **_UNCONFINED,
            "limits": limits,
            "filter": program.hex(),
            "has_launcher": True,
            "ignores_sigterm": True,
        }
        return Launch(argv=wrapped, confinement=confinement, uid=uid, needs_home=True)


class _Landlock:
    """The kernel's access rules for unprivileged programs, for machines and containers without user namespaces."""

    name = "Landlock"

    @cached_property
    def _version(self) -> int:
        return confine.landlock_version()

    @property
    def layers(self) -> tuple[str, ...]:
        """What it enforces."""
        signals = ", no signals to others" if self._version >= confine.SCOPE_VERSION else ""
        return (f"Landlock version {self._version}: read-only files, no other process's memory{signals}",)

    @property
    def missing(self) -> str:
        """What it lacks on this machine; empty if nothing."""
        return "" if self._version else "the kernel has not enabled it"

    def launch(
        self, argv: Sequence[str], files: Files, limits: Mapping[str, int], uid: int | None, most: int
    ) -> Launch:
        """Restricts the process that executes the program; cannot limit its processes."""
        confinement = {
            **_UNCONFINED,
            "limits": limits,
            "uid": uid,
            "filter": filter_program().hex(),
            "readable": ("/proc", *map(str, files.readable)),
            "writable": (*_DEVICES, *map(str, files.writable)),
        }
        return Launch(argv=tuple(argv), confinement=confinement, uid=uid, needs_home=True)


def _most_processes(bounds: Bounds) -> int:
    return bounds.process_count + PROCESS_HEADROOM if bounds.process_count else 0


def supervised(launch: Launch) -> list[str]:
    """Returns the arguments that start a launch below a process that confines it and kills what it leaves behind."""
    return [sys.executable, "-I", "-S", str(SCRIPT), json.dumps(dict(launch.confinement)), *launch.argv]


def _own_process(argv: Sequence[str], limits: Mapping[str, int], uid: int | None) -> Launch:
    confinement = {**_UNCONFINED, "limits": limits, "uid": uid, "filter": filter_program().hex()}
    return Launch(argv=tuple(argv), confinement=confinement, uid=uid, needs_home=uid is not None)


def _problem_of(launch: Launch, folder: Path) -> str:
    """Returns why a launch does not work on this machine; empty if it does."""
    try:
        done = subprocess.run(
            supervised(launch), cwd=folder, env={}, capture_output=True, timeout=PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return ""
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"a program ended with status {done.returncode}"


def _python_folders() -> Iterable[Path]:
    """Returns the folders of this Python and its packages, without the working directory, which `-m` puts among them."""
    here = {Path.cwd(), Path.home(), Path(tempfile.gettempdir()), Path("/")}
    places = dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path))
    paths = [Path(place) for place in places if place]
    return [
        path for path in dict.fromkeys((*paths, *(p.resolve() for p in paths))) if path.exists() and path not in here
    ]


def _without(path: Path, hidden: Sequence[Path]) -> tuple[Path, ...]:
    """Returns a folder, or if something hidden is below it, everything in it that is not hidden."""
    real = path.resolve()
    if not real.exists():
        return ()
    inside = [
        each for each in hidden if each == real or each.is_relative_to(real) or each.resolve().is_relative_to(real)
    ]
    if not inside:
        return (path,)
    if any(real in (each, each.resolve()) for each in inside) or not real.is_dir():
        return ()
    return tuple(kept for child in sorted(path.iterdir()) for kept in _without(child, inside))
