"""Deletes folders that code of a tenant has filled, and gives folders to its user.

Invariant: nothing outside the folder is changed, even if a process of the tenant moves and replaces what is inside at the same
time: every step begins at an open folder, follows no link, and ends one level below. Neither the depth of a tree nor the
length of its paths is limited.
"""

import errno
import os
import secrets
import sys
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final

_OWNER_ONLY: Final = 0o700
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def give_files(root: Path, uid: int) -> None:
    """Makes a user and its group the owner of a directory tree. Blocks.

    A file with several names is left as it is: it may be a link to a file outside.

    Raises:
        OSError: If the tree is changed meanwhile.
    """
    folder = os.open(root, _FOLDER)
    try:
        todo = [(_identity(folder), _give_entries(folder, uid))]
        while todo:
            _, names = todo[-1]
            if names:
                folder = _replaced(folder, names.pop())
                todo.append((_identity(folder), _give_entries(folder, uid)))
                continue
            todo.pop()
            if todo:
                folder = _replaced(folder, "..")
                if _identity(folder) != todo[-1][0]:
                    raise OSError(errno.ESTALE, "a folder was moved")
    finally:
        os.close(folder)


def delete_tree(root: Path) -> None:
    """Deletes a directory tree of any depth and size, including read-only directories. Blocks.

    A subdirectory is moved up to the root before it is emptied, so that neither recursion nor the length of paths grows
    with the depth.

    Raises:
        OSError: If an entry cannot be deleted, such as another user's file, or is added meanwhile.
    """
    if root.is_symlink():
        root.unlink()
        return
    prefix, numbers = secrets.token_hex(8), count()
    top = _writable_folder(str(root), None)
    try:
        todo = _delete_files(top)
        while todo:
            name = todo.pop()
            folder = _writable_folder(name, top)
            try:
                for inner in _delete_files(folder):
                    # Only a folder that is writable itself can be moved.
                    os.close(_writable_folder(inner, folder))
                    moved = f"{prefix}-{next(numbers)}"
                    os.rename(inner, moved, src_dir_fd=folder, dst_dir_fd=top)
                    todo.append(moved)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    root.rmdir()


def _identity(folder: int) -> tuple[int, int]:
    status = os.fstat(folder)
    return status.st_dev, status.st_ino


def _replaced(folder: int, name: str) -> int:
    """Opens a folder from another, which is closed."""
    opened = os.open(name, _FOLDER, dir_fd=folder)
    os.close(folder)
    return opened


def _give_entries(folder: int, uid: int) -> list[str]:
    """Gives a folder and its files to a user; returns the names of its subfolders."""
    os.fchown(folder, uid, uid)
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
                continue
            with suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_nlink == 1:
                    os.chown(entry.name, uid, uid, dir_fd=folder, follow_symlinks=False)
    return folders


def _delete_files(folder: int) -> list[str]:
    """Deletes all files and links in a folder; returns the names of its subfolders."""
    folders = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return folders


def _writable_folder(name: str, parent: int | None) -> int:
    """Opens a folder that its owner may read and write from then on."""
    try:
        folder = os.open(name, _FOLDER, dir_fd=parent)
    except PermissionError:
        _allow_owner(name, parent)
        folder = os.open(name, _FOLDER, dir_fd=parent)
    os.fchmod(folder, _OWNER_ONLY)
    return folder


def _allow_owner(name: str, parent: int | None) -> None:
    if sys.platform != "linux":
        os.chmod(name, _OWNER_ONLY, dir_fd=parent, follow_symlinks=False)
        return
    # Linux changes the mode of no name without following links.
    found = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        Path(f"/proc/self/fd/{found}").chmod(_OWNER_ONLY)
    finally:
        os.close(found)
