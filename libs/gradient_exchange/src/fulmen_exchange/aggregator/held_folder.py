"""The folder of a shard's sums, which one server holds at a time. No torch is needed.

A lock says that the holder lives; the kernel, or the server of a network file system, releases it when it has died. Each holder
renames the folder: one that was cut off from it, and returns after another has taken it, does not find it and stores nothing.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from fulmen_exchange.aggregator.folders import make_folder, sync_folder


class FolderHeld(Exception):
    """Another server that lives holds the folder."""


class FolderLost(Exception):
    """Another server has taken the folder."""


class HeldFolder:
    """The folder of a shard; holds it until `release`.

    Attributes:
        path: Where the folder is as long as this holds it.
    """

    def __init__(self, parent: Path, name: str, *, is_synced: bool = True) -> None:
        """Takes the folder, creating it if there is none.

        Args:
            parent: An existing folder.
            name: Name of the folder, without the number of its holder.
            is_synced: Whether it must survive a crash of the machine.

        Raises:
            FolderHeld: if another server holds it.
        """
        self._lock = os.open(parent / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = _renamed(parent, name, is_synced=is_synced)
        except BlockingIOError:
            os.close(self._lock)
            raise FolderHeld(f"another server holds {name}") from None
        except BaseException:
            os.close(self._lock)
            raise

    def release(self) -> None:
        """Lets another server take the folder."""
        os.close(self._lock)


def _renamed(parent: Path, name: str, *, is_synced: bool) -> Path:
    """Gives the folder the number of its new holder. One without a number is of an older version of this package."""
    numbers = {int(path.suffix[1:]): path for path in parent.glob(f"{name}.*") if path.suffix[1:].isdecimal()}
    if (parent / name).is_dir():
        numbers.setdefault(0, parent / name)
    newest = max(numbers, default=0)
    path = parent / f"{name}.{newest + 1}"
    if numbers:
        numbers[newest].rename(path)
        if is_synced:
            sync_folder(parent)
    else:
        make_folder(path, is_synced=is_synced)
    return path
