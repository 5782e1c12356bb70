"""The programs of a runner: fetches an agent's specification and files, loads them and caches the result.

Invariant: a version of an agent is fetched and loaded at most once at a time; failures are not cached. A cached program
holds its files, which are deleted when it has been evicted and its last attempt has ended.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Protocol

from fulmen_runner.agents.bundles import UnpackedBundles
from fulmen_runner.agents.command.host import Command, CommandAgent, CommandGrader, CommandHost
from fulmen_runner.agents.command.limits import allowance
from fulmen_runner.agents.hosts import Hosts
from fulmen_runner.agents.judge import JudgeClient, judge
from fulmen_runner.agents.python.child_entry import ChildAgent, ChildGrader, child_program, plain_environment
from fulmen_runner.agents.python.environment_view import viewing
from fulmen_runner.agents.python.host import PythonHost, python_agent, python_grader
from fulmen_runner.agents.python.loader import load_callable
from fulmen_runner.agents.python.threads import run_in_thread
from fulmen_runner.agents.specification import (
    Bundle,
    CommandTarget,
    ContainerTarget,
    JobTarget,
    JudgeTarget,
    Limits,
    PythonTarget,
    Specification,
    check_output_limit,
)
from fulmen_runner.agents.venvs.own_python import Venv
from fulmen_runner.agents.venvs.venvs import Venvs
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.outcome import MAX_OUTPUT_BYTES
from fulmen_runner.attempts.program import Agent, Grader, Program
from fulmen_runner.attempts.uses import Uses
from fulmen_service_kit.isolation.levels import Isolation

MAX_PROGRAMS = 64
"""Number of cached programs; the least recently used is evicted first."""


class Library(Protocol):
    """Source of specifications and bundles. Implementations: `StoreLibrary`, `FixedLibrary`."""

    async def specification(self, name: str, project: str) -> Specification:
        """Returns a version of an agent. Raises AgentFailed or ProgramUnavailable."""

    async def bundle(self, name: str, project: str) -> Bundle:
        """Returns a version of a bundle. Raises AgentFailed or ProgramUnavailable."""

    async def prompts(self, assignment: Assignment) -> Mapping[str, str]:
        """Returns the texts of an attempt's prompts, by name. Raises AgentFailed or ProgramUnavailable."""

    async def secrets(self, assignment: Assignment) -> Mapping[str, str]:
        """Returns the secrets that an attempt's agent names, by variable. Raises AgentFailed or ProgramUnavailable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """The programs of a runner.

    Attributes:
        library: Source of specifications and bundles.
        commands: Host of commands.
        python: Host of Python agents.
        default: Agent of rollouts that name none; None if the runner has none.
        hosts: Hosts of containers and Jobs.
        judges: HTTP client of judges.
        bundles: Unpacked bundles.
        venvs: Virtual environments.
    """

    library: Library
    commands: CommandHost
    python: PythonHost
    default: Specification | None
    hosts: Hosts
    judges: JudgeClient
    bundles: UnpackedBundles
    venvs: Venvs
    _numbers: "count[int]" = field(default_factory=count)
    _programs: "OrderedDict[tuple[str, str], asyncio.Task[Program]]" = field(default_factory=OrderedDict)

    async def resolve(self, assignment: Assignment) -> Program:
        """Returns the program of an attempt.

        Raises:
            AgentFailed: If the agent does not exist or cannot be loaded.
            ProgramUnavailable: If the store cannot be reached.
        """
        key = (assignment.project, assignment.agent)
        known = self._programs.get(key)
        if known is None:
            known = asyncio.create_task(self._load(*key), name=f"load {assignment.agent or 'default agent'}")
            self._programs[key] = known
            known.add_done_callback(lambda task: self._settled(key, task))
        self._programs.move_to_end(key)
        # Shielded: other attempts may be waiting for the same program.
        return await asyncio.shield(known)

    async def prompts(self, assignment: Assignment) -> Mapping[str, str]:
        """Returns an attempt's prompts by name. Raises AgentFailed or ProgramUnavailable."""
        return await self.library.prompts(assignment)

    async def secrets(self, assignment: Assignment) -> Mapping[str, str]:
        """Returns the secrets that an attempt's agent names, by variable. Raises AgentFailed or ProgramUnavailable."""
        return await self.library.secrets(assignment)

    def _settled(self, key: tuple[str, str], task: "asyncio.Task[Program]") -> None:
        failed = task.cancelled() or task.exception() is not None
        # It may have been evicted while loading, and another load started.
        if failed and self._programs.get(key) is task:
            self._programs.pop(key, None)
        while len(self._programs) > MAX_PROGRAMS:
            _, evicted = self._programs.popitem(last=False)
            evicted.add_done_callback(_end_use)

    async def _load(self, project: str, agent: str) -> Program:
        if agent:
            specification = await self.library.specification(agent, project)
        elif self.default is not None:
            specification = self.default
        else:
            raise AgentFailed("rollout names no agent, and the runner has no default agent")
        if not specification.bundle and specification.venv is None:
            return await self._program(specification, None, None)
        with ExitStack() as ends:
            directory = venv = None
            if specification.bundle:
                unpacked = await self.bundles.unpacked(await self.library.bundle(specification.bundle, project))
                ends.callback(unpacked.uses.end)
                directory = unpacked.directory
            if specification.venv is not None:
                held = await self.venvs.held(specification.venv, directory)
                ends.callback(held.release)
                venv = held.venv
            program = await self._program(specification, directory, venv)
            return replace(program, files=Uses(release=ends.pop_all().close))

    async def _program(self, specification: Specification, directory: Path | None, venv: Venv | None) -> Program:
        graded = specification.grader is not None
        # Visible to modules during their import; the agents themselves get it with each attempt.
        folder = self.bundles.work_dir / f"program-{next(self._numbers)}"
        with viewing(plain_environment(specification)):
            agent = await self._agent(specification, directory, folder, venv, graded=graded)
            grader = await self._grader(specification, directory, folder, venv)
        has_children = isinstance(agent, ChildAgent) or isinstance(grader, ChildGrader)
        return Program(
            agent=agent,
            grader=grader,
            environment=dict(specification.environment),
            secrets=specification.secrets,
            folder=folder if has_children else None,
        )

    async def _agent(
        self, specification: Specification, directory: Path | None, folder: Path, venv: Venv | None, *, graded: bool
    ) -> Agent:
        isolation = self.commands.isolation
        if venv is not None and isinstance(specification.entry, ContainerTarget | JobTarget):
            raise AgentFailed("virtual_environment is for Python and command agents: install packages in the image")
        match target := specification.entry:
            case PythonTarget() if (level := self.python.level(target)) is not Isolation.TRUSTED or venv is not None:
                program = child_program(
                    target, directory, specification, level=level, folder=folder, grading=False, venv=venv
                )
                return ChildAgent(children=self.python.children, program=program)
            case PythonTarget():
                function = await run_in_thread(load_callable, target.target, directory)
                return python_agent(function, self.python, graded=graded)
            case CommandTarget():
                return CommandAgent(command=self._command(target, directory, specification.limits, venv), graded=graded)
            case ContainerTarget():
                isolation.check(Isolation.CONTAINER, "a container")
                containers = await self.hosts.containers()
                environment, limits = specification.environment, specification.limits
                return await containers.agent(target, directory, environment=environment, limits=limits, graded=graded)
            case JobTarget():
                jobs = await self.hosts.jobs()
                environment, limits = specification.environment, specification.limits
                return await jobs.agent(target, directory, environment=environment, limits=limits, graded=graded)

    async def _grader(
        self, specification: Specification, directory: Path | None, folder: Path, venv: Venv | None
    ) -> Grader | None:
        match target := specification.grader:
            case None:
                return None
            case PythonTarget() if (level := self.python.level(target)) is not Isolation.TRUSTED or venv is not None:
                program = child_program(
                    target, directory, specification, level=level, folder=folder, grading=True, venv=venv
                )
                return ChildGrader(children=self.python.children, program=program)
            case PythonTarget():
                function = await run_in_thread(load_callable, target.target, directory)
                return python_grader(function, self.python)
            case CommandTarget():
                return CommandGrader(command=self._command(target, directory, specification.limits, venv))
            case JudgeTarget():
                return judge(target, self.judges)

    def _command(self, target: CommandTarget, directory: Path | None, limits: Limits, venv: Venv | None) -> Command:
        if not target.argv:
            raise AgentFailed("command of the agent is empty")
        check_output_limit(target.output_kept_bytes)
        return Command(
            host=self.commands,
            argv=target.argv,
            cwd=directory,
            output_kept_bytes=target.output_kept_bytes or MAX_OUTPUT_BYTES,
            allowance=allowance(
                limits,
                memory_bytes=self.commands.memory_bytes,
                process_count=self.commands.process_count,
                disk_bytes=self.commands.disk_bytes,
            ),
            level=self.commands.isolation.level(target.isolation, f"the command {target.argv[0]}"),
            venv=venv,
        )


def _end_use(task: "asyncio.Task[Program]") -> None:
    """Ends the catalogue's use of a program; one that failed to load has none."""
    if not task.cancelled() and task.exception() is None:
        program = task.result()
        program.end_use()
        if program.folder is not None:
            # Attempts that still use it make it again.
            with suppress(OSError):
                program.folder.rmdir()
