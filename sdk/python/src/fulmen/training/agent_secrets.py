"""The secrets that an agent names: whether the project has them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from fulmen.rpc.services import Services
from fulmen.store.v1 import secret_service_pb2 as pb
from fulmen.train_toml.train import ConfigError

__all__ = ["list_secrets", "require_secrets", "set_from_environment"]


async def require_secrets(client: Services, names: Sequence[str], *, in_process: bool = False) -> None:
    """Checks that the project has the secrets that an agent names; a stack in this process gets them from its environment.

    Raises:
        ConfigError: if any is missing; lists all of them.
    """
    if not names:
        return
    if in_process:
        await set_from_environment(client, names)
    known = {each.name for each in await list_secrets(client)}
    how = "set the variable {0} in this shell" if in_process else "run `fulmen secret set {0}`"
    missing = [f"{name}: {how.format(name)}" for name in names if name not in known]
    if missing:
        raise ConfigError("The agent names secrets that do not exist; nothing was created.", missing)


async def list_secrets(client: Services, project: str = "") -> Sequence[pb.Secret]:
    """Returns the secrets of a project; by default the token's project."""
    return (await client.secrets.ListSecrets(pb.ListSecretsRequest(project=project))).secrets


async def set_from_environment(client: Services, names: Sequence[str], environ: Mapping[str, str] = os.environ) -> None:
    """Sets an agent's secrets from the variables of the same names; unset ones are left out."""
    for name in names:
        if environ.get(name):
            await client.secrets.SetSecret(pb.SetSecretRequest(name=name, value=environ[name].encode()))
