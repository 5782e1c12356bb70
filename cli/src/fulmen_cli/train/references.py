"""What a training names and does not publish: an earlier run, scores, secrets. `--check` and creation look them up alike."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from fulmen.rpc.services import Services
from fulmen.train_toml.train import ConfigError, TrainConfig
from fulmen.training.agent_secrets import require_secrets
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed
from fulmen_cli.names import run_name
from fulmen_cli.rollout.rescore.scores import found_scores

__all__ = ["References", "found_references"]

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class References:
    """What was found.

    Attributes:
        config: The configuration with the whole name of the earlier run.
        inputs: Published versions by use.
        problems: Everything that does not exist.
    """

    config: TrainConfig
    inputs: Mapping[str, str]
    problems: Sequence[str] = ()

    def checked(self) -> References:
        """Returns itself.

        Raises:
            ConfigError: if anything does not exist.
        """
        if self.problems:
            raise ConfigError(f"{self.config.file} names what does not exist; nothing was created.", self.problems)
        return self


async def found_references(
    config: TrainConfig, connection: Connection, client: Services, *, in_process: bool = False
) -> References:
    """Looks up what a configuration names.

    Raises:
        FulmenError: if a service refuses or cannot be reached.
    """
    data, problems = config.data, list[str]()

    async def tried(lookup: Awaitable[Found]) -> Found | None:
        try:
            return await lookup
        except ConfigError as error:
            problems.extend(error.problems)
        except CommandFailed as error:
            problems.append(str(error))
        return None

    rollouts = await tried(run_name(data.rollouts, connection, client)) or ""
    scores = await tried(found_scores(client, data.scores)) if data.scores else None
    await tried(require_secrets(client, config.secrets, in_process=in_process))
    inputs = {"scores": str(scores.name)} if scores is not None else {}
    if rollouts:
        inputs["rollouts"] = rollouts
    found = replace(config, data=replace(data, rollouts=rollouts))
    return References(config=found, inputs=inputs, problems=problems)
