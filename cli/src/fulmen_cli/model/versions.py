"""Versions of policies as the store describes them, and where their weights are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fulmen.rpc.services import Services
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit

__all__ = ["FORMS", "PolicyVersion", "find_version", "read_versions", "whole_weights"]

FORMS: Final = "a policy, POLICY@VERSION such as solver@12, or POLICY@ALIAS such as solver@best"
KIND: Final = "policy"
BATCH: Final = 64
LONGEST_CHAIN: Final = 1001
_PREFIX: Final = "resources/policy."
_GIVEN: Final = re.compile(r"([a-z0-9._-]{1,63})(?:@([a-z0-9._-]{1,63}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """A version of a policy.

    Attributes:
        resource: The resource, with its content.
        kind: Format of the weights: `full`, `delta` or `lora`.
        path: Folder of the weights on the machine of the algorithm service.
        run: Training run that published it; empty if unknown.
        step: Step of the run after which it was written.
        size_bytes: Size of its files.
        sha256: Checksum of its weights.
        base: delta: version that it applies to.
        base_model: lora: folder of the model that its adapters belong to.
        adapters: lora: names of the adapters.
        merged: lora: folder of a complete model with the adapter merged; empty if there is none.
    """

    resource: resource_pb2.ResourceVersion
    kind: str
    path: str
    run: str = ""
    step: int = 0
    size_bytes: int = 0
    sha256: str = ""
    base: str = ""
    base_model: str = ""
    adapters: tuple[str, ...] = ()
    merged: str = ""

    @classmethod
    def read(cls, resource: resource_pb2.ResourceVersion) -> PolicyVersion:
        """Reads what a resource of kind `policy` describes.

        Raises:
            CommandFailed: if it describes no weights.
        """
        try:
            described: dict[str, Any] = json.loads(resource.content)
            return cls(
                resource=resource,
                kind=str(described.get("kind", "full")),
                path=str(described["path"]),
                run=str(described.get("run", "")),
                step=int(described.get("step", 0)),
                size_bytes=int(described.get("size_bytes", 0)),
                sha256=str(described.get("sha256", "")),
                base=str(described.get("base", "")),
                base_model=str(described.get("base_model", "")),
                adapters=tuple(map(str, described.get("adapters", ()))),
                merged=str(described.get("merged", "")),
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise CommandFailed(f"{resource.name} does not describe weights.") from error

    @property
    def name(self) -> str:
        """`resources/policy.{policy}/versions/{n}`."""
        return self.resource.name

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self.name.removeprefix(_PREFIX).partition("/")[0]

    @property
    def short(self) -> str:
        """`POLICY@VERSION`, as commands take it."""
        return f"{self.policy}@{self.resource.version}"


async def find_version(given: str, connection: Connection, client: Services) -> PolicyVersion:
    """Returns the version that is meant.

    Raises:
        CommandFailed: if it has another form, or describes no weights.
        ResourceNotFound: if there is none.
    """
    name = given
    if not given.startswith(_PREFIX):
        match = _GIVEN.fullmatch(given.removeprefix("policy."))
        if match is None:
            raise CommandFailed(f"{given!r} is no version of a policy: give {FORMS}.", exit_code=Exit.USAGE)
        policy, version = match.groups()
        kind = "versions" if version and version.isdecimal() else "aliases"
        name = f"{_PREFIX}{policy}" + (f"/{kind}/{version}" if version else "")
    (found,) = await read_versions([name], connection, client)
    return found


async def read_versions(names: Sequence[str], connection: Connection, client: Services) -> list[PolicyVersion]:
    """Reads versions with their descriptions.

    Raises:
        CommandFailed: if one describes no weights.
        ResourceNotFound: if one does not exist.
    """
    found: list[PolicyVersion] = []
    for start in range(0, len(names), BATCH):
        request = resource_service_pb2.GetResourcesRequest(
            names=names[start : start + BATCH], project=connection.project
        )
        answer = await client.resources.GetResources(request)
        found += [PolicyVersion.read(resource) for resource in answer.resources]
    return found


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
            f"{links[-1][1].short} is a difference from an earlier version, which the algorithm service's package puts together: "
            "`pip install fulmen-algorithm`."
        ) from None
    try:
        return await ModelFolders(aside).rebuild(
            [ChainLink(path=path, sha256=each.sha256) for path, each in links], links[-1][1].step
        )
    except RunFailed as error:
        raise CommandFailed(error.message) from error
