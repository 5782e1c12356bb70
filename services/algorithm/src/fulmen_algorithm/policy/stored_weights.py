"""Weights of versions published by other runs, as described by resources of kind `policy`.

The folders are on this machine, on a disk shared with the publisher, or in the object store of the runs. Only those below
the operator's roots are opened.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from fulmen.errors import ResourceNotFound
from fulmen_algorithm.policy.model_roots import ModelRoots
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChainLink, Content, PublishedPolicy, ResourceStore
from fulmen_algorithm.training.files import is_storage_trouble
from fulmen_algorithm.training.settings import WeightsKind

LONGEST_CHAIN = 1001
POLICY_KIND = "policy"
REWARD_MODEL = "reward_model"
"""Purpose of versions that score answers."""


class WeightFolders(Protocol):
    """Folders of weights on this machine, of one project; see `RunFiles`."""

    @property
    def project(self) -> str:
        """`projects/{project}`."""

    def path_of(self, place: str) -> Path:
        """Returns the folder of a place that a version names."""

    async def fetched(self, path: Path) -> Path:
        """Returns a folder, downloaded if only object storage has it."""

    async def rebuild_model(self, chain: Sequence[ChainLink], step: int) -> Path:
        """Rebuilds a complete folder."""


async def stored_policy(
    content: Content, *, resources: ResourceStore, files: WeightFolders, roots: ModelRoots
) -> PublishedPolicy:
    """Returns a version to serve or to start from; a delta is rebuilt into a folder of `files` when needed.

    Raises:
        RunFailed: if it is unreadable, or its weights are missing or outside the operator's roots.
        ResourceNotFound: if it depends on a missing version.
    """
    try:
        return await _described(content, resources=resources, files=files, roots=roots)
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        if is_storage_trouble(error):
            raise
        # Stored by another release, restored, or by hand.
        raise RunFailed(f"{content.name} does not describe weights that this service can read.") from error


async def reward_model_folder(name: str, *, resources: ResourceStore, files: WeightFolders, roots: ModelRoots) -> Path:
    """Returns the complete folder of a reward model, rebuilt if need be.

    Raises:
        RunFailed: if it does not exist, is not a reward model, or its weights no longer exist.
    """
    try:
        content = await resources.get(name)
        stored = await stored_policy(content, resources=resources, files=files, roots=roots)
        is_one = read_description(content).get("purpose") == REWARD_MODEL
    except ResourceNotFound as error:
        raise RunFailed(f"{name} does not exist.") from error
    if not is_one:
        raise RunFailed(f"{name} is not a reward model.")
    return await stored.model_folder()


async def _described(
    content: Content, *, resources: ResourceStore, files: WeightFolders, roots: ModelRoots
) -> PublishedPolicy:
    description = read_description(content)
    path, kind = await _folder(description, files, roots), WeightsKind(description.get("kind", "full"))
    if not path.is_dir():
        raise RunFailed(f"The weights of {content.name} no longer exist: there is no folder {path}.")
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
                base_model=await _located(str(description["base_model"]), files, roots),
                adapters=adapters,
                rebuild=partial(_existing, await _located(str(merged), files, roots)) if merged else None,
            )
        case WeightsKind.DELTA:
            chain = await _chain(content, resources, files, roots)
            return plain(path=path, kind=kind, rebuild=partial(files.rebuild_model, chain, int(description["step"])))


async def _chain(
    content: Content, resources: ResourceStore, files: WeightFolders, roots: ModelRoots
) -> list[ChainLink]:
    """Follows the bases of a delta back to a complete folder."""
    links: list[ChainLink] = []
    for _ in range(LONGEST_CHAIN):
        description = read_description(content)
        links.append(ChainLink(path=await _folder(description, files, roots), sha256=_sha256(description)))
        if "base" not in description:
            return links[::-1]
        content = await resources.get(str(description["base"]))
    raise RunFailed(f"{content.name} has too long a chain of deltas.")


async def _folder(description: Mapping[str, Any], files: WeightFolders, roots: ModelRoots) -> Path:
    return await _located(str(description["path"]), files, roots)


async def _located(place: str, files: WeightFolders, roots: ModelRoots) -> Path:
    """Returns the folder of a place that a version names: a path, or `runs:/<project>/<run>/<path>` in their storage."""
    return await files.fetched(roots.checked(files.path_of(place), project=files.project))


async def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise RunFailed(f"Folder {folder} no longer exists.")
    return folder


def read_description(content: Content) -> Mapping[str, Any]:
    """Reads the description of a version's weights.

    Raises:
        RunFailed: if it is not a version of a policy.
        ValueError: if it is not JSON.
    """
    if content.kind != POLICY_KIND:
        # Any other kind may be published by clients, who must not choose folders of this machine.
        raise RunFailed(f"{content.name} is of kind {content.kind}, not of kind {POLICY_KIND}.")
    description: Mapping[str, Any] = json.loads(content.data)
    return description


def _sha256(description: Mapping[str, Any]) -> str:
    # Versions of earlier releases have a checksum of their files, not of the weights.
    return str(description["sha256"]) if "kind" in description else ""
