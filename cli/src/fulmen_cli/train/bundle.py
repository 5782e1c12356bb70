"""Packs an agent's directory as a reproducible tar.gz of the files' names, contents and execute bits.

Equal folders give equal bytes, so that an unchanged agent is recognised by its digest and published once.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fulmen.train_toml.train import ConfigError

__all__ = ["Bundle", "pack_bundle"]

# The limit of ResourceVersion.content.
MAX_BUNDLE_BYTES: Final = 16 * 1024 * 1024
# Packing stops here: a folder this large is a mistake, and would only be compressed to be refused.
MAX_UNPACKED_BYTES: Final = 256 * 1024 * 1024
# Files of [data] above this size stay outside: they are published by themselves.
MAX_DATA_FILE_BYTES: Final = 1024 * 1024
LARGEST_SHOWN: Final = 5
COMPRESSION_LEVEL: Final = 6
_SKIPPED_FOLDERS: Final = frozenset(
    {
        "__pycache__", ".git", ".hg", ".svn", ".venv", "venv", ".fulmen", ".mypy_cache", ".pytest_cache", ".ruff_cache",
        ".ipynb_checkpoints", ".idea", ".vscode", ".tox", ".nox", ".eggs",
    }
)  # fmt: skip
_SKIPPED_SUFFIXES: Final = (".pyc", ".pyo", ".swp")
_SKIPPED_FILES: Final = frozenset({".DS_Store", "Thumbs.db"})
_EXECUTABLE_MODE: Final = 0o755
_PLAIN_MODE: Final = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A packed folder and the names of its files."""

    content: bytes
    files: tuple[str, ...]


def pack_bundle(folder: Path, *, data_files: tuple[Path, ...] = ()) -> Bundle:
    """Packs a folder without caches, version control and large data files.

    Args:
        folder: what to pack; links in it must stay inside it.
        data_files: files of the configuration's [data]; large ones are left out.

    Raises:
        ConfigError: if the folder is too large, or holds a link that leads out of it.
    """
    folder = folder.resolve()
    large_data = {path.resolve() for path in data_files if path.stat().st_size > MAX_DATA_FILE_BYTES}
    chosen = sorted((path.relative_to(folder).as_posix(), path) for path in _walk(folder) if path not in large_data)
    sizes = {name: path.stat().st_size for name, path in chosen}
    if sum(sizes.values()) > MAX_UNPACKED_BYTES:
        raise _too_large(folder, sum(sizes.values()), MAX_UNPACKED_BYTES, sizes)
    content = _compress(chosen)
    if len(content) > MAX_BUNDLE_BYTES:
        raise _too_large(folder, len(content), MAX_BUNDLE_BYTES, sizes)
    return Bundle(content=content, files=tuple(sizes))


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder, followlinks=False):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        for name in (*files, *(each for each in folders if (Path(root) / each).is_symlink())):
            path = Path(root) / name
            if name in _SKIPPED_FILES or name.endswith(_SKIPPED_SUFFIXES):
                continue
            if path.is_symlink():
                _check_link(folder, path)
            if path.is_file():
                yield path


def _check_link(folder: Path, path: Path) -> None:
    target = path.resolve()
    if not target.is_relative_to(folder) or target.is_dir():
        raise ConfigError(
            "The agent's folder cannot be packed; nothing was created.",
            [f"{path}: a link to {target}; only links to files inside the directory can be packed"],
        )


def _compress(chosen: list[tuple[str, Path]]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=COMPRESSION_LEVEL, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, path in chosen:
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = _EXECUTABLE_MODE if path.stat().st_mode & stat.S_IXUSR else _PLAIN_MODE
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _too_large(folder: Path, size_bytes: int, limit_bytes: int, sizes: dict[str, int]) -> ConfigError:
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:LARGEST_SHOWN]
    return ConfigError(
        f"The agent's folder {folder} is too large to publish: {size_bytes} bytes, maximum {limit_bytes}; "
        "nothing was created. Its largest files:",
        [f"{size:>12} bytes  {name}" for name, size in largest],
    )
