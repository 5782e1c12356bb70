"""Weights of versions published by other runs, as described by resources of kind `policy`.

The folders are on this machine or on a disk shared with the publisher.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fulmen_algorithm.persistence.run_files import RunFiles
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChainLink, Content, PublishedPolicy, ResourceStore
from fulmen_algorithm.training.settings import WeightsKind

LONGEST_CHAIN = 1001


async def stored_policy(content: Content, *, resources: ResourceStore, files: RunFiles) -> PublishedPolicy:
    """Returns a version to serve or to start from; a delta is rebuilt into a folder of `files` when needed.

    Raises:
        RunFailed: if it is unreadable, or its weights are missing.
        ResourceNotFound: if it depends on a missing version.
    """
    try:
        return await _described(content, resources=resources, files=files)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        # Stored by another release, restored, or by hand.
        raise RunFailed(f"{content.name} does not describe weights that this service can read.") from error


async def _described(content: Content, *, resources: ResourceStore, files: RunFiles) -> PublishedPolicy:
    description = _read(content)
    path, kind = Path(str(description["path"])), WeightsKind(description.get("kind", "full"))
    if not path.is_dir():
        raise RunFailed(f"The weights of {content.name} are gone: there is no folder {path}.")
    plain = partial(PublishedPolicy, name=content.name, version=content.version, sha256=_sha256(description))
    match kind:
        case WeightsKind.FULL:
            return plain(path=path)
        case WeightsKind.LORA:
            merged = description.get("merged")
            adapters = {str(name): path / str(name) for name in description["adapters"]}
            return plain(
                path=path,
                kind=kind,
                base_model=Path(str(description["base_model"])),
                adapters=adapters,
                rebuild=partial(_existing, Path(str(merged))) if merged else None,
            )
        case WeightsKind.DELTA:
            chain = await _chain(content, resources)
            return plain(path=path, kind=kind, rebuild=partial(files.rebuild_model, chain, int(description["step"])))


async def _chain(content: Content, resources: ResourceStore) -> list[ChainLink]:
    """Follows the bases of a delta back to a complete folder."""
    links: list[ChainLink] = []
    for _ in range(LONGEST_CHAIN):
        description = _read(content)
        links.append(ChainLink(path=Path(str(description["path"])), sha256=_sha256(description)))
        if "base" not in description:
            return links[::-1]
        content = await resources.get(str(description["base"]))
    raise RunFailed(f"{content.name} has too long a chain of deltas.")


async def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise RunFailed(f"Folder {folder} no longer exists.")
    return folder


def _read(content: Content) -> Mapping[str, Any]:
    description: Mapping[str, Any] = json.loads(content.data)
    return description


def _sha256(description: Mapping[str, Any]) -> str:
    # Versions of earlier releases have a checksum of their files, not of the weights.
    return str(description["sha256"]) if "kind" in description else ""
