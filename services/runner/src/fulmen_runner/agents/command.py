"""Agents and graders that are commands in any language.

Invariant: a command gets its input on standard input and by `{task_file}`, the attempt's environment, and nothing of
the runner's own environment but an allow-list.
"""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fulmen_runner.agents.guardian import Guardian
from fulmen_runner.agents.process import ProcessLimits, ProcessResult, run_process
from fulmen_runner.domain.errors import AgentFailed
from fulmen_runner.domain.outcome import MAX_MESSAGE_BYTES, MAX_OUTPUT_BYTES, Reward
from fulmen_runner.domain.program import Answer, Invocation
from fulmen_runner.domain.rewards import rewards_of_grade, rewards_of_last_line

TASK_FILE = "{task_file}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandHost:
    """What all commands of a runner share.

    Attributes:
        inherited: The runner's variables that commands get.
        work_dir: Where task files are written; each is deleted with its attempt.
        output_allowed_bytes: A command that writes more is killed.
    """

    guardian: Guardian
    inherited: Mapping[str, str]
    work_dir: Path
    output_allowed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A program with its arguments.

    Attributes:
        argv: `{task_file}` is replaced in each.
        cwd: The unpacked bundle, or None for the runner's own directory.
        output_kept_bytes: How much of the end of its standard output is the outcome.
    """

    host: CommandHost
    argv: Sequence[str]
    cwd: Path | None
    output_kept_bytes: int = MAX_OUTPUT_BYTES

    async def run(self, invocation: Invocation, stdin: bytes) -> str:
        """Runs the command once and returns the end of its standard output.

        Raises:
            AgentFailed: If it cannot be started, exits with another status than 0, or writes too much.
        """
        limits = ProcessLimits(
            stdout_kept_bytes=self.output_kept_bytes,
            stderr_kept_bytes=MAX_MESSAGE_BYTES,
            output_allowed_bytes=self.host.output_allowed_bytes,
        )
        with tempfile.TemporaryDirectory(prefix="attempt-", dir=self.host.work_dir) as directory:
            argv = list(self.argv)
            if any(TASK_FILE in argument for argument in argv):
                task_file = Path(directory, "task")
                task_file.write_bytes(stdin)
                argv = [argument.replace(TASK_FILE, str(task_file)) for argument in argv]
            try:
                result = await run_process(
                    argv,
                    cwd=self.cwd,
                    environment={**self.host.inherited, **invocation.context.environment},
                    stdin=stdin,
                    limits=limits,
                    guardian=self.host.guardian,
                )
            except OSError as error:
                raise AgentFailed(f"The command {argv[0]!r} cannot be started: {error.strerror}") from None
        self._check(result)
        return result.stdout.decode(errors="replace")

    def _check(self, result: ProcessResult) -> None:
        stderr = result.stderr.decode(errors="replace")
        if result.flooded:
            raise AgentFailed(f"The command wrote more than {self.host.output_allowed_bytes} bytes and was killed.")
        if result.exit_code < 0:
            raise AgentFailed(f"The command was ended by signal {-result.exit_code}.\n{stderr}".rstrip())
        if result.exit_code:
            raise AgentFailed(f"The command exited with status {result.exit_code}.\n{stderr}".rstrip())


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandAgent:
    """An agent that is a command: its outcome is what it prints; a last line that is a number or a JSON object of
    numbers is its reward, unless there is a grader.
    """

    command: Command
    graded: bool

    async def run(self, invocation: Invocation) -> Answer:
        """Runs the command on the rollout's input."""
        output = (await self.command.run(invocation, invocation.work.input)).rstrip("\r\n")
        return Answer(value=output, rewards=() if self.graded else rewards_of_last_line(output))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandGrader:
    """A grader that is a command; its last line of output is a number or a JSON object from dimension to number."""

    command: Command

    async def grade(self, invocation: Invocation, outcome: object) -> tuple[Reward, ...]:
        """Runs the command on the task and the outcome."""
        try:
            document = json.dumps({"task": invocation.task, "outcome": outcome}).encode()
        except (TypeError, ValueError) as error:
            raise AgentFailed(f"A command cannot grade this outcome, which JSON cannot hold: {error}") from None
        output = await self.command.run(invocation, document)
        last_line = output.rstrip().rsplit("\n", maxsplit=1)[-1]
        if not last_line:
            return ()
        try:
            return rewards_of_grade(json.loads(last_line))
        except ValueError:
            raise AgentFailed(f"The grader's last line is not JSON: {last_line[:200]!r}") from None
