"""Packs an agent's directory as a reproducible tar.gz of the files' names, contents and execute bits.

Equal folders give equal bytes, so that an unchanged agent is recognised by its digest and published once.
"""

from __future__ import annotations

import gzip
import io
import os
import stat
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from fulmen.train_toml.agent import AgentConfig
from fulmen.train_toml.train import ConfigError
from fulmen.training.bundle_files import SECRET, LeftOut, Selection, choose_files, require_no_secrets

__all__ = ["Bundle", "bundle_lines", "bundle_summary", "pack_bundle"]

# The limit of ResourceVersion.content.
MAX_BUNDLE_BYTES: Final = 16 * 1024 * 1024
# Packing stops here: a folder this large is a mistake, and would only be compressed to be refused.
MAX_UNPACKED_BYTES: Final = 256 * 1024 * 1024
# Files of [data] above this size stay outside: they are published by themselves.
MAX_DATA_FILE_BYTES: Final = 1024 * 1024
LARGEST_SHOWN: Final = 5
MAX_SHOWN: Final = 100
COMPRESSION_LEVEL: Final = 6
_EXECUTABLE_MODE: Final = 0o755
_PLAIN_MODE: Final = 0o644


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """A packed folder: the names and sizes of its files in bytes, and what was left out."""

    content: bytes = field(repr=False)
    sizes: Mapping[str, int]
    left_out: tuple[LeftOut, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its files."""
        return tuple(self.sizes)


def pack_bundle(
    folder: Path | None,
    *,
    data_files: Sequence[Path] = (),
    agent: AgentConfig | None = None,
    added: Mapping[str, Path] = MappingProxyType({}),
) -> Bundle:
    """Packs a folder without secrets, caches, ignored files and large data files.

    Args:
        folder: what to pack; links in it must stay inside it. None for only the added files.
        data_files: files of the configuration's [data]; large ones are left out.
        agent: the agent, whose own files must not be left out; its `include` adds files that would otherwise be left
            out.
        added: further files by their name in the bundle; they replace others of the same name.

    Raises:
        ConfigError: if the folder is too large, holds a link that leads out of it, a file whose content looks like a
            secret, or if a file that is needed to start the agent would be left out.
    """
    include = () if agent is None else agent.include
    if folder is None:
        selection, folder = Selection(files={}, left_out=()), Path()
    else:
        folder = folder.resolve()
        selection = choose_files(folder, include=include)
    large_data = {path.resolve() for path in data_files if path.stat().st_size > MAX_DATA_FILE_BYTES}
    chosen = {name: path for name, path in selection.files.items() if path not in large_data}
    chosen |= added
    if agent is not None:
        _require_own_files(folder, agent, chosen, selection.left_out)
    sizes = {name: path.stat().st_size for name, path in chosen.items()}
    if sum(sizes.values()) > MAX_UNPACKED_BYTES:
        raise _too_large(folder, sum(sizes.values()), MAX_UNPACKED_BYTES, sizes)
    require_no_secrets(chosen, include=include)
    content = _compress(chosen)
    if len(content) > MAX_BUNDLE_BYTES:
        raise _too_large(folder, len(content), MAX_BUNDLE_BYTES, sizes)
    return Bundle(content=content, sizes=sizes, left_out=selection.left_out)


def bundle_summary(bundle: Bundle) -> str:
    """Returns a line about a bundle: how many files, how large, and what was left out because it may contain
    secrets."""
    secrets = [each.name for each in bundle.left_out if each.why == SECRET]
    text = f"{len(bundle.sizes)} files, {_size(sum(bundle.sizes.values()))}"
    return (
        f"{text}; left out, because they may contain secrets: {', '.join(secrets[:LARGEST_SHOWN])}" if secrets else text
    )


def bundle_lines(bundle: Bundle) -> list[str]:
    """Returns a line for each file of a bundle and for what was left out, at most `MAX_SHOWN` of each."""
    lines = [f"The bundle has {len(bundle.sizes)} files, {_size(sum(bundle.sizes.values()))}:"]
    lines += [f"  {_size(size_bytes):>10}  {name}" for name, size_bytes in list(bundle.sizes.items())[:MAX_SHOWN]]
    if len(bundle.sizes) > MAX_SHOWN:
        lines.append(f"  and {len(bundle.sizes) - MAX_SHOWN} more; `--output json` lists all of them")
    if bundle.left_out:
        lines.append("Left out:")
        lines += [f"  {each.name}: {each.why}" for each in bundle.left_out[:MAX_SHOWN]]
    if len(bundle.left_out) > MAX_SHOWN:
        lines.append(f"  and {len(bundle.left_out) - MAX_SHOWN} more")
    return lines


def _size(size_bytes: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} bytes"


def _require_own_files(
    folder: Path, agent: AgentConfig, chosen: Mapping[str, Path], left_out: Sequence[LeftOut]
) -> None:
    """Raises ConfigError if a file that starts or grades the agent does not exist or is left out."""
    targets = [target.partition(":")[0] for target in (agent.python, agent.grader)]
    programs = [command[0] for command in (agent.command, agent.grader_command) if command]
    words = [*(target for target in targets if target.endswith(".py")), *agent.command, *agent.grader_command]
    words += [agent.requirements] if agent.requirements else []
    problems = []
    for word in dict.fromkeys(words):
        name = os.path.normpath(word)
        if name in chosen or Path(name).is_absolute():
            continue
        if word in programs and os.sep in word and "{" not in word and not (folder / name).is_file():
            problems.append(f"{word}: no such file in {folder}")
        elif word in programs and os.sep in word and _is_installed(folder / name):
            problems.append(
                f"{word}: an installed program of this machine, which cannot be bundled. Name its environment for runners on "
                f'this machine, `venv = "{Path(name).parent.parent}"`, or the packages for any runner, '
                f'`requirements = "requirements.txt"`; or write "{Path(name).name}" for the one on each runner\'s PATH'
            )
        elif (folder / name).is_file() and not name.startswith(".."):
            why = next((each.why for each in left_out if each.name == name or name.startswith(each.name)), "left out")
            problems.append(f'{word}: {why}. Add `include = ["{name}"]` to [agent], or name an installed program')
    if problems:
        raise ConfigError("The agent cannot be started from its bundle; nothing was created.", problems)


def _is_installed(program: Path) -> bool:
    """Returns whether a program belongs to a virtual environment, or links to one elsewhere: a copy of it would not
    start."""
    return program.is_symlink() or (program.parent.parent / "pyvenv.cfg").is_file()


def _compress(chosen: Mapping[str, Path]) -> bytes:
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, compresslevel=COMPRESSION_LEVEL, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, path in chosen.items():
            content = path.read_bytes()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            entry.mode = _EXECUTABLE_MODE if path.stat().st_mode & stat.S_IXUSR else _PLAIN_MODE
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _too_large(folder: Path, size_bytes: int, limit_bytes: int, sizes: Mapping[str, int]) -> ConfigError:
    largest = sorted(sizes.items(), key=lambda item: -item[1])[:LARGEST_SHOWN]
    return ConfigError(
        f"The agent's folder {folder} is too large to publish: {size_bytes} bytes, maximum {limit_bytes}; "
        "nothing was created. Its largest files:",
        [f"{size:>12} bytes  {name}" for name, size in largest],
    )
