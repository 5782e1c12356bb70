"""Control groups below this service's own: the kernel's limits of memory and processes for children. Version 2 or 1.

Invariant: a group is created only where this process may write, and removed when its processes are dead.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Final, Self

PREFIX: Final = "fulmen-"
_CONTROLLERS: Final = ("memory", "pids")
_MEMORY_LIMIT: Final = {1: "memory.limit_in_bytes", 2: "memory.max"}
_MEMORY_EVENTS: Final = {1: "memory.oom_control", 2: "memory.events"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    """The groups of one child, one per hierarchy.

    Attributes:
        version: Version of control groups.
        folders: Folder by controller; the same one with version 2.
    """

    version: int
    folders: Mapping[str, Path]

    @property
    def process_files(self) -> tuple[str, ...]:
        """Files to which a process writes 0 to enter."""
        return tuple(str(folder / "cgroup.procs") for folder in dict.fromkeys(self.folders.values()))

    @property
    def has_killed(self) -> bool:
        """Whether the kernel has killed a process for exceeding the limit of memory."""
        try:
            lines = (self.folders["memory"] / _MEMORY_EVENTS[self.version]).read_text("ascii").splitlines()
        except (OSError, KeyError):
            return False
        return any(line.startswith("oom_kill ") and int(line.split()[1]) > 0 for line in lines)

    def remove(self) -> None:
        """Removes the groups; one with a process that is still dying stays, and is removed by the next service."""
        for folder in dict.fromkeys(self.folders.values()):
            _remove(folder)


class Cgroups:
    """Creates groups below this service's own."""

    def __init__(self, version: int, parents: Mapping[str, Path]) -> None:
        """Use `find`."""
        self.version = version
        self._parents = parents
        self._numbers = count(1)

    @classmethod
    def find(cls, proc: Path = Path("/proc")) -> Self | None:
        """Returns the control groups that this process may write; None without any."""
        own = _own_groups(proc)
        found = {name: folder for name in _CONTROLLERS if (folder := own.get(name)) and _is_writable(folder)}
        version = 1
        unified = own.get("")
        if not found and unified is not None and _delegates(unified):
            found, version = dict.fromkeys(_CONTROLLERS, unified), 2
        for folder in set(found.values()):
            _remove_leftovers(folder)
        return cls(version, found) if found else None

    def create(self, *, memory_bytes: int, process_count: int) -> Cgroup:
        """Creates the groups of a child; a limit of 0 is none.

        Raises:
            OSError: If a group cannot be created.
        """
        name = f"{PREFIX}{os.getpid()}-{next(self._numbers)}"
        group = Cgroup(version=self.version, folders={each: path / name for each, path in self._parents.items()})
        for folder in dict.fromkeys(group.folders.values()):
            folder.mkdir()
        if memory_bytes and "memory" in group.folders:
            (group.folders["memory"] / _MEMORY_LIMIT[self.version]).write_text(str(memory_bytes))
            if self.version > 1:
                (group.folders["memory"] / "memory.oom.group").write_text("1")
        if process_count and "pids" in group.folders:
            (group.folders["pids"] / "pids.max").write_text(str(process_count))
        return group


def _own_groups(proc: Path) -> dict[str, Path]:
    """Returns the folder of this process's group by controller; that of version 2 is named by an empty text."""
    try:
        groups = (proc / "self/cgroup").read_text("utf-8").splitlines()
        mounts = (proc / "self/mountinfo").read_text("utf-8").splitlines()
    except OSError:
        return {}
    roots: dict[str, tuple[str, Path]] = {}
    for mount in mounts:
        place, _, kind = mount.partition(" - ")
        file_system, _, options = kind.partition(" ")
        names = {"cgroup": options.split()[-1].split(","), "cgroup2": [""]}.get(file_system, [])
        fields = place.split()
        roots |= {name: (fields[3], Path(fields[4])) for name in names}
    found = {}
    for line in groups:
        _, names_text, path = line.split(":", 2)
        for name in names_text.split(","):
            if name in roots:
                root, mounted_at = roots[name]
                # In a container the mount may show a part of the hierarchy only.
                inside = path.removeprefix(root.rstrip("/")) if path.startswith(root.rstrip("/") + "/") else path
                folder = mounted_at / inside.strip("/")
                found[name] = folder if folder.is_dir() else mounted_at
    return found


def _is_writable(folder: Path) -> bool:
    probe = folder / f"{PREFIX}{os.getpid()}-0"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _delegates(folder: Path) -> bool:
    """Returns True if groups below a group of version 2 can have limits. Moves this process into one, as that needs."""
    try:
        if not set(_CONTROLLERS) <= set((folder / "cgroup.controllers").read_text("ascii").split()):
            return False
        if set(_CONTROLLERS) <= set((folder / "cgroup.subtree_control").read_text("ascii").split()):
            return _is_writable(folder)
        # A group with controllers for its children holds no processes of its own (cgroups(7)).
        own = folder / f"{PREFIX}{os.getpid()}-service"
        own.mkdir()
        (own / "cgroup.procs").write_text("0")
        (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in _CONTROLLERS))
    except OSError:
        return False
    return True


def _remove_leftovers(parent: Path) -> None:
    """Removes the groups of dead services."""
    for folder in parent.glob(f"{PREFIX}*-*"):
        owner = folder.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            _remove(folder)


def _remove(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
