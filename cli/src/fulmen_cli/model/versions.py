"""Versions of policies as the store describes them, and where their weights are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from fulmen.policy_versions import POLICY_PREFIX, PolicyVersion
from fulmen.rpc.resource_contents import read_resources
from fulmen.rpc.services import Services
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit

__all__ = ["FORMS", "find_version", "read_versions", "whole_weights"]

FORMS: Final = "a policy, POLICY@VERSION such as solver@12, or POLICY@ALIAS such as solver@best"
KIND: Final = "policy"
LONGEST_CHAIN: Final = 1001
_GIVEN: Final = re.compile(r"([a-z0-9._-]{1,63})(?:@([a-z0-9._-]{1,63}))?")


async def find_version(given: str, connection: Connection, client: Services) -> PolicyVersion:
    """Returns the version that is meant.

    Raises:
        CommandFailed: if it has another form, or describes no weights.
        ResourceNotFound: if there is none.
    """
    name = given
    if not given.startswith(POLICY_PREFIX):
        match = _GIVEN.fullmatch(given.removeprefix("policy."))
        if match is None:
            raise CommandFailed(f"{given!r} is not a version of a policy: give {FORMS}.", exit_code=Exit.USAGE)
        policy, version = match.groups()
        kind = "versions" if version and version.isdecimal() else "aliases"
        name = f"{POLICY_PREFIX}{policy}" + (f"/{kind}/{version}" if version else "")
    (found,) = await read_versions([name], connection, client)
    return found


async def read_versions(names: Sequence[str], connection: Connection, client: Services) -> list[PolicyVersion]:
    """Reads versions with their descriptions.

    Raises:
        CommandFailed: if one describes no weights.
        ResourceNotFound: if one does not exist.
    """
    resources = await read_resources(client.resources, names, project=connection.project)
    try:
        return [PolicyVersion.read(resource) for resource in resources]
    except ValueError as error:
        raise CommandFailed(str(error)) from error


async def whole_weights(version: PolicyVersion, connection: Connection, client: Services, *, aside: Path) -> Path:
    """Returns a folder with a complete model.

    Args:
        version: The version.
        connection: The options of the command.
        client: The services.
        aside: Folder in which a model is rebuilt that was published as a difference from another one.

    Raises:
        CommandFailed: if the weights are not on this machine, or consist of adapters.
    """
    if version.kind == "lora":
        if not version.merged:
            raise CommandFailed(
                f"{version.short} consists of adapters: `fulmen model merge-lora {version.short} FOLDER`."
            )
        return local_folder(version.merged, version)
    if version.kind == "full":
        return local_folder(version.path, version)
    chain = [version]
    while chain[-1].base and len(chain) < LONGEST_CHAIN:
        chain += await read_versions([chain[-1].base], connection, client)
    return await _rebuilt(chain[::-1], aside)


def local_folder(path: str, version: PolicyVersion) -> Path:
    """Returns a folder of weights on this machine.

    Raises:
        CommandFailed: if it is not here.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CommandFailed(
            f"The weights of {version.short} are not on this machine: there is no folder {path}. Run this command where "
            "the algorithm service runs, or mount the folder here."
        )
    return folder


async def _rebuilt(chain: Iterable[PolicyVersion], aside: Path) -> Path:
    links = [(local_folder(each.path, each), each) for each in chain]
    try:
        from fulmen_algorithm.persistence.model_folders import ModelFolders
        from fulmen_algorithm.runs.failure import RunFailed
        from fulmen_algorithm.runs.ports import ChainLink
    except ImportError:
        raise CommandFailed(
            f"{links[-1][1].short} is a difference from an earlier version; assembling it needs the algorithm service's package: "
            "`pip install fulmen-algorithm`."
        ) from None
    try:
        return await ModelFolders(aside).rebuild(
            [ChainLink(path=path, sha256=each.sha256) for path, each in links], links[-1][1].step
        )
    except RunFailed as error:
        raise CommandFailed(error.message) from error
