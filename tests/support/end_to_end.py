"""What the end-to-end tests share: a running stack, and the main job done on it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fulmen.rpc.services import Services
from fulmen_cli.local.stack import LocalStack
from tests.support.cli.commands import Done, fulmen


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A running stack, its client, and the folder that the command line finds it by."""

    stack: LocalStack
    client: Services
    state_dir: Path

    async def fulmen(self, *arguments: str | Path) -> Done:
        """Runs a command of `fulmen` against this stack."""
        return await fulmen(*arguments, "--state-dir", self.state_dir)


@dataclass(frozen=True, slots=True, kw_only=True)
class MainJob:
    """What `fulmen train examples/arithmetic/train.toml` left behind; its policy stays served until another is."""

    done: Done
    reports: Path
