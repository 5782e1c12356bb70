"""How a runner isolates agents: launches of their processes, with the files and limits of an attempt."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from fulmen_runner.agents.command.limits import Allowance
from fulmen_runner.attempts.errors import AgentFailed, HostUnavailable
from fulmen_service_kit.isolation.launch import Bounds, Files, Isolator, Launch
from fulmen_service_kit.isolation.levels import Isolation, IsolationUnavailable
from fulmen_service_kit.isolation.trees import give_files

SETTING: Final = "FULMEN_RUNNER_ISOLATION"
TRUSTING: Final = Isolator(Isolation.TRUSTED, setting=SETTING)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentIsolation:
    """The isolation of all agents and graders of a runner.

    Attributes:
        isolator: Builds launches.
    """

    isolator: Isolator = field(default=TRUSTING)

    def level(self, wish: Isolation | None, what: str) -> Isolation:
        """Returns the level of a process of this machine; `what` names it in errors.

        Raises:
            AgentFailed: If the operator requires containers or Jobs.
        """
        level = self.isolator.level(wish)
        self.check(Isolation.SANDBOX, what)
        return level

    def check(self, kind: Isolation, what: str) -> None:
        """Checks that the operator allows a kind of agent.

        Raises:
            AgentFailed: If the operator requires more.
        """
        floor = self.isolator.floor
        if floor.rank > kind.rank:
            needed = "a container or a job" if floor is Isolation.CONTAINER else "a job"
            raise AgentFailed(
                f"{what} is not isolated enough for this runner, which requires `{floor}` ({SETTING}): make it {needed}, "
                "or require a label of runners that allow it"
            )

    async def launch(
        self, argv: Sequence[str], level: Isolation, *, files: Files, allowance: Allowance, owned: Path
    ) -> Launch:
        """Builds the launch of a process, and gives it the folder that it may write.

        Raises:
            HostUnavailable: If this machine cannot isolate it.
            AgentFailed: See `give`.
        """
        bounds = Bounds(
            memory_bytes=allowance.memory_bytes,
            process_count=allowance.process_count,
            file_bytes=allowance.disk_bytes,
        )
        try:
            if level is Isolation.TRUSTED:
                return self.isolator.launch(argv, level, files, bounds)
            # In a thread: the first launch of a level tries it.
            launch = await asyncio.to_thread(self.isolator.launch, argv, level, files, bounds)
        except IsolationUnavailable as error:
            raise HostUnavailable(f"runner refuses to run agents: {error}") from None
        except OSError as error:
            raise HostUnavailable(f"control group of the attempt cannot be created: {error.strerror}") from None
        if launch.uid is not None:
            await give(owned, launch.uid)
        return launch


async def give(folder: Path, uid: int) -> None:
    """Makes a process's user the owner of a folder of its attempt.

    Raises:
        AgentFailed: If a process that the attempt left behind changes the folder meanwhile.
    """
    try:
        await asyncio.to_thread(give_files, folder, uid)
    except OSError as error:
        raise AgentFailed(f"files of the attempt cannot be given to its next process: {error.strerror}") from None
