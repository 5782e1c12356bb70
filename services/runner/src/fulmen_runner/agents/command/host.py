"""Agents and graders that are commands in any language.

Invariant: a command gets its input on stdin and through placeholders, and the attempt's environment and files; of the
runner's own environment it gets only an allow-list.
"""

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.command.limits import UNLIMITED, Allowance
from fulmen_runner.agents.command.process import ProcessLimits, run_process
from fulmen_runner.agents.environment import files_environment, named_files
from fulmen_runner.agents.isolation import AgentIsolation
from fulmen_runner.agents.rewards_file import read_rewards_file
from fulmen_runner.agents.templates import expand, placeholders_of
from fulmen_runner.agents.venvs.own_python import Venv
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.masking import masked_bytes
from fulmen_runner.attempts.outcome import MAX_MESSAGE_BYTES, MAX_OUTPUT_BYTES, Reward
from fulmen_runner.attempts.program import Answer, Invocation
from fulmen_runner.attempts.rewards import joined, rewards_of_grade, rewards_of_last_line
from fulmen_service_kit.isolation.launch import Files
from fulmen_service_kit.isolation.levels import Isolation


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandHost:
    """Configuration shared by all commands of a runner.

    Attributes:
        guardian: Starts the processes.
        inherited: Variables inherited from the runner.
        work_dir: Directory of unpacked bundles.
        output_allowed_bytes: Output above which a command is killed.
        memory_bytes: Memory limit per attempt; 0 for no limit.
        process_count: Limit of processes and threads per attempt; 0 for no limit.
        disk_bytes: Limit of an attempt's files; 0 for no limit.
        isolation: Isolates them.
    """

    guardian: Guardian
    inherited: Mapping[str, str]
    work_dir: Path
    output_allowed_bytes: int
    memory_bytes: int = 0
    process_count: int = 0
    disk_bytes: int = 0
    isolation: AgentIsolation = field(default_factory=AgentIsolation)


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """Result of a successful command: the end of its standard output, and the rewards from its rewards file."""

    text: str
    emitted: tuple[Reward, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program with its arguments.

    Attributes:
        host: Shared configuration.
        argv: Templates of the arguments.
        cwd: The unpacked bundle; None for the attempt's working directory.
        output_kept_bytes: Size of the end of its standard output that is kept.
        allowance: Resource limits.
        level: Its isolation.
        venv: Its virtual environment; None for the runner's packages.
    """

    host: CommandHost
    argv: Sequence[str]
    cwd: Path | None
    output_kept_bytes: int = MAX_OUTPUT_BYTES
    allowance: Allowance = UNLIMITED
    level: Isolation = Isolation.TRUSTED
    venv: Venv | None = None

    async def run(self, invocation: Invocation, stdin: bytes) -> Printed:
        """Runs the command.

        Raises:
            AgentFailed: If its templates do not match the input, it cannot be started, exits with a non-zero status,
                exceeds a limit, or leaves a malformed rewards file.
            HostUnavailable: If it cannot be isolated on this machine.
        """
        files = await invocation.workspace.open()
        argv = _expanded(self.argv, invocation, named_files(files))
        rewards_file = files.new_rewards_file()
        environment = {
            **self.host.inherited,
            **self._own_python(),
            **invocation.context.environment,
            **files_environment(files, rewards_file),
        }
        cwd = self.cwd or files.work_dir
        _require_program(argv[0], cwd, has_bundle=self.cwd is not None)
        readable = (cwd,) if self.venv is None else (cwd, *self.venv.readable)
        launch = await self.host.isolation.launch(
            argv,
            self.level,
            files=Files(readable=readable, writable=(files.root,), folder=cwd),
            allowance=self.allowance,
            owned=files.root,
        )
        if launch.needs_home:
            environment["HOME"] = str(files.temporary_dir)
        printed = invocation.kept_tails
        try:
            result = await run_process(
                launch,
                cwd=cwd,
                folders=(files.root,),
                environment=environment,
                stdin=stdin,
                limits=ProcessLimits(
                    stdout_kept_bytes=max(self.output_kept_bytes, printed.limit_bytes),
                    stderr_kept_bytes=max(MAX_MESSAGE_BYTES, printed.limit_bytes),
                    output_allowed_bytes=self.host.output_allowed_bytes,
                    allowance=self.allowance,
                ),
                guardian=self.host.guardian,
                printed=printed,
            )
        except OSError as error:
            raise AgentFailed(f"command {argv[0]!r} cannot be started: {error.strerror}") from None
        except ValueError as error:
            # A NUL character from the input.
            raise AgentFailed(f"command {self.argv[0]!r} cannot be started: {error}") from None
        # Masked separately, since it may begin inside the key.
        result = replace(result, stderr=masked_bytes(result.stderr, invocation.assignment.masked_values))
        if result.failure:
            raise AgentFailed(f"command {result.failure}")
        emitted = await asyncio.to_thread(read_rewards_file, rewards_file)
        return Printed(text=result.stdout[-self.output_kept_bytes :].decode(errors="replace"), emitted=emitted)

    def _own_python(self) -> dict[str, str]:
        """Returns the variables of the virtual environment, in which the SDK can be imported."""
        if self.venv is None:
            return {}
        path = [self.host.inherited.get("PYTHONPATH", ""), str(self.venv.modules.sdk)]
        return self.venv.variables(self.host.inherited) | {"PYTHONPATH": os.pathsep.join(filter(None, path))}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAgent:
    """An agent that is a command. Its outcome is its standard output; without a grader, a last line that is a number or
    a JSON object of numbers is its reward.
    """

    command: Command
    graded: bool

    async def run(self, invocation: Invocation) -> Answer:
        """Runs the command on the rollout's input."""
        printed = await self.command.run(invocation, invocation.assignment.input)
        output = printed.text.rstrip("\r\n")
        rewards = () if self.graded else rewards_of_last_line(output)
        return Answer(value=output, rewards=rewards, emitted=printed.emitted)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandGrader:
    """A grader that is a command. Its last line of output is a number or a JSON object from dimension to number, or it
    prints nothing and writes its rewards to the rewards file.
    """

    command: Command

    async def grade(self, invocation: Invocation, outcome: object) -> tuple[Reward, ...]:
        """Runs the command on the task and the outcome."""
        try:
            document = json.dumps({"task": invocation.task, "outcome": outcome}).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise AgentFailed(f"outcome cannot be passed to the grader's command as JSON: {error}") from None
        printed = await self.command.run(invocation, document)
        last_line = printed.text.rstrip().rsplit("\n", maxsplit=1)[-1]
        if not last_line:
            return printed.emitted
        try:
            return joined(printed.emitted, rewards_of_grade(json.loads(last_line)))
        except (ValueError, RecursionError):
            raise AgentFailed(f"last line of the grader is not JSON: {last_line[:200]!r}") from None


def _require_program(program: str, cwd: Path, *, has_bundle: bool) -> None:
    """Raises AgentFailed if a program is named by a relative path that leads nowhere.

    Checked before the start: at some levels of isolation it is a launcher that fails, with a message of its own.
    """
    if "/" not in program or program.startswith("/") or "\0" in program or (cwd / program).exists():
        return
    folder = "agent's bundle" if has_bundle else "attempt's empty folder, as the agent has no bundle"
    raise AgentFailed(
        f"command {program!r} cannot be started: No such file or directory. The path is relative to the {folder}; a "
        "bundle does not include a virtual environment. Name the agent's packages with `requirements` or `venv`, or a"
        " program on the runner's "
        "PATH, or by its absolute path on the runner."
    )


def _expanded(argv: Sequence[str], invocation: Invocation, named: Mapping[str, str]) -> list[str]:
    templates = {f"argument {number}": argument for number, argument in enumerate(argv)}
    return list(expand(templates, placeholders_of(invocation, **named)).values())
