"""Runs one attempt, from its assignment to its outcome.

Invariant: `execute` returns within the attempt's timeout plus the stop and flush timeouts, whatever the agent does.
Threads and tasks that the agent leaves running are counted in `stragglers` and hold their slot until they end.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import structlog

from fulmen.agent import Context, entered
from fulmen.ids import span_id_of, trace_id_of
from fulmen.spans import attributes as names
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.classification import CaptureEvidence, classify
from fulmen_runner.attempts.errors import (
    AgentFailed,
    AgentTimedOut,
    CapturesUnavailable,
    HostUnavailable,
    ProgramUnavailable,
)
from fulmen_runner.attempts.hooks import AttemptHooks, HookedAttempt
from fulmen_runner.attempts.masking import masked_bytes, masked_message
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome, cut_at_front
from fulmen_runner.attempts.printed import PrintedTails
from fulmen_runner.attempts.program import Invocation, Program
from fulmen_runner.attempts.progress import ProgressBoard
from fulmen_runner.attempts.stragglers import Stragglers
from fulmen_runner.attempts.workspace import Workspace, Workspaces
from fulmen_service_kit.observability.own_traces import OwnSpan, OwnTraces

STOP_TIMEOUT_S = 5.0
"""Time that a cancelled agent has before it becomes a straggler."""

STOPPED = "STOPPED"
"""Error of the span of an attempt that was cancelled or released, or lost its lease."""

_log = structlog.get_logger()


class Captures(Protocol):
    """The model proxies' captures. Implementations: `CaptureClient`, `SlotMonitor`, and those of offline runs."""

    async def reach(self) -> None:
        """Waits until a proxy answers. Raises CapturesUnavailable."""

    async def flush(self, attempt: str) -> CaptureEvidence:
        """Waits until the attempt's spans are stored; returns the summary. Raises CapturesUnavailable."""


class Programs(Protocol):
    """Resolves programs. Implementations: `Catalogue`, and the single program of a rescore."""

    async def resolve(self, assignment: Assignment) -> Program:
        """Returns the program of an attempt. Raises AgentFailed or ProgramUnavailable."""

    async def prompts(self, assignment: Assignment) -> Mapping[str, str]:
        """Returns an attempt's prompts by name. Raises AgentFailed or ProgramUnavailable."""

    async def secrets(self, assignment: Assignment) -> Mapping[str, str]:
        """Returns the secrets that an attempt's agent names, by variable. Raises AgentFailed or ProgramUnavailable."""


class ExpandEnvironment(Protocol):
    """Expands the templates in an agent's environment."""

    async def __call__(
        self, templates: Mapping[str, str], assignment: Assignment, task: object, workspace: Workspace
    ) -> dict[str, str]:
        """Returns the expanded variables. Raises AgentFailed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptExecutor:
    """Runs any number of attempts concurrently.

    Attributes:
        environment_of: Returns the variables that the runner sets for an attempt.
        expand_environment: Expands the variables of the agent's specification. Raises AgentFailed.
        workspaces: Working directories of attempts.
        flush_spans: Flushes an attempt's spans; returns the number that the store has not acknowledged.
        hooks: Hooks to call around attempts; None if there are none.
        progress: Gets what agents report of their progress.
        printed_bytes: Size of the end of standard output, and of standard error, that is kept with an attempt; 0 for none.
    """

    captures: Captures
    programs: Programs
    stragglers: Stragglers
    environment_of: Callable[[Assignment], dict[str, str]]
    expand_environment: ExpandEnvironment
    workspaces: Workspaces
    flush_spans: Callable[[str], Awaitable[int]]
    hooks: AttemptHooks | None = None
    progress: ProgressBoard = field(default_factory=ProgressBoard)
    printed_bytes: int = 0

    async def execute(self, assignment: Assignment) -> Outcome:
        """Runs an attempt and returns its outcome. On cancellation, stops the agent first."""
        if self.hooks is None:
            return await self._execute(assignment, None)
        return await self.hooks.around(assignment, partial(self._execute, assignment))

    async def _execute(self, assignment: Assignment, hooked: HookedAttempt | None) -> Outcome:
        deadline = time.monotonic() + assignment.timeout_s
        try:
            async with asyncio.timeout(assignment.timeout_s):
                await self.captures.reach()
                assignment = replace(assignment, prompts=await self.programs.prompts(assignment))
                program = await self._program(assignment)
                if program.secrets:
                    assignment = replace(assignment, secrets=await self._secrets(program, assignment))
        except CapturesUnavailable as error:
            return Failed(kind=FailureKind.INFRA, message=str(error))
        except (ProgramUnavailable, HostUnavailable) as error:
            return Failed(kind=FailureKind.INFRA, message=str(error))
        except TimeoutError:
            message = "attempt timed out while its agent was being fetched, or its virtual environment was being built"
            return Failed(kind=FailureKind.INFRA, message=message)
        except AgentFailed as error:
            return _agent_error(str(error), assignment)
        except RecursionError:
            return _nested_too_deeply(assignment)
        try:
            return await self._execute_program(program, assignment, hooked, deadline=deadline)
        finally:
            # Stragglers may still read the files.
            self.stragglers.after(assignment.attempt, program.end_use)

    async def _program(self, assignment: Assignment) -> Program:
        """Resolves the program and begins its use."""
        while True:
            program = await self.programs.resolve(assignment)
            # The catalogue may have evicted it meanwhile.
            if program.begin_use():
                return program

    async def _secrets(self, program: Program, assignment: Assignment) -> Mapping[str, str]:
        """Fetches the attempt's secrets; ends the program's use if that fails."""
        try:
            return await self.programs.secrets(assignment)
        except BaseException:
            program.end_use()
            raise

    async def _execute_program(
        self,
        program: Program,
        assignment: Assignment,
        hooked: HookedAttempt | None,
        *,
        deadline: float,
    ) -> Outcome:
        if hooked is not None and (failed := await hooked.trace_start()) is not None:
            return failed
        printed = PrintedTails(limit_bytes=self.printed_bytes)
        outcome = await self._run(program, assignment, deadline, printed)
        try:
            evidence = await self.captures.flush(assignment.attempt)
        except CapturesUnavailable:
            evidence = None
        undelivered = await self.flush_spans(assignment.attempt)
        if hooked is not None:
            await hooked.trace_end(evidence, undelivered)
        classified = classify(
            outcome,
            started_at=deadline - assignment.timeout_s,
            evidence=evidence,
            undelivered_spans=undelivered,
        )
        masked = _without_secret(classified, assignment)
        return replace(masked, printed=printed.reported(assignment.masked_values))

    async def _run(self, program: Program, assignment: Assignment, deadline: float, printed: PrintedTails) -> Outcome:
        workspace = self.workspaces.of(assignment.input, program.folder)
        try:
            return await self._run_in(workspace, program, assignment, deadline, printed)
        finally:
            await workspace.close()

    async def _run_in(
        self, workspace: Workspace, program: Program, assignment: Assignment, deadline: float, printed: PrintedTails
    ) -> Outcome:
        try:
            decoded = assignment.task()
            own = await self.expand_environment(program.environment, assignment, decoded, workspace)
        except AgentFailed as error:
            return _agent_error(str(error), assignment)
        context = Context(
            rollout=assignment.rollout,
            attempt=assignment.attempt,
            attempt_number=assignment.number,
            mode=assignment.mode.value,
            deadline=deadline,
            environment={**own, **self.environment_of(assignment)},
            resource_versions=assignment.resource_versions,
            open_work_dir=lambda: workspace.open_here().work_dir,
        )
        invocation = Invocation(
            assignment=assignment, task=decoded, context=context, workspace=workspace, printed=printed
        )
        with entered(context), self.progress.following(assignment, context.progress, workspace):
            return await self._finish(program, invocation, deadline)

    async def _finish(self, program: Program, invocation: Invocation, deadline: float) -> Outcome:
        """Runs the program until its end or the attempt's deadline."""
        assignment = invocation.assignment
        task = asyncio.create_task(program.run(invocation), name=assignment.attempt)
        try:
            await asyncio.wait((task,), timeout=max(0.0, deadline - time.monotonic()))
            timed_out = not task.done()
        finally:
            await self._stop(task, assignment)
        if timed_out:
            return Failed(kind=FailureKind.TIMEOUT, message=self._timeout_message(invocation))
        if task.cancelled():
            return _agent_error("agent cancelled itself", assignment)
        try:
            return task.result()
        except AgentFailed as error:
            return _agent_error(str(error), assignment)
        except RecursionError:
            return _nested_too_deeply(assignment)
        except AgentTimedOut as error:
            return Failed(kind=FailureKind.TIMEOUT, message=str(error))
        except HostUnavailable as error:
            return Failed(kind=FailureKind.INFRA, message=str(error))

    def _timeout_message(self, invocation: Invocation) -> str:
        assignment = invocation.assignment
        message = f"timeout of {assignment.timeout_s:g} s exceeded while the {invocation.progress.part} was running"
        if self.stragglers.left_by(assignment.attempt):
            message += (
                '; it blocks a thread and keeps its slot until it returns. Set `isolation = "process"` for the agent or'
                " FULMEN_RUNNER_ISOLATION=process for the runner to run it in a process that can be killed."
            )
        return message

    async def _stop(self, task: asyncio.Task[Outcome], assignment: Assignment) -> None:
        if task.done():
            return
        task.cancel()
        # Before the wait, which may itself be cancelled.
        self.stragglers.add(task, assignment.attempt)
        await asyncio.wait((task,), timeout=STOP_TIMEOUT_S)
        if not task.done():
            _log.warning("agent_ignores_cancellation", attempt=assignment.attempt)


Execute = Callable[[Assignment], Coroutine[Any, Any, Outcome]]


def _nested_too_deeply(assignment: Assignment) -> Failed:
    """Returns the outcome of a RecursionError. Only what a tenant made nests that deeply, so that a retry ends the same."""
    _log.error("attempt_nested_too_deeply", attempt=assignment.attempt, exc_info=True)
    return _agent_error("agent's files, input or outcome are nested too deeply", assignment)


def _agent_error(message: str, assignment: Assignment) -> Failed:
    return Failed(kind=FailureKind.AGENT_ERROR, message=cut_at_front(masked_message(message, assignment.masked_values)))


def _without_secret(outcome: Outcome, assignment: Assignment) -> Outcome:
    """Masks the attempt's key and secrets in an outcome, and truncates the message to the contract's limit."""
    output = outcome.output
    content = masked_bytes(output.content, assignment.masked_values)
    if content is not output.content:
        output = replace(output, content=content)
    if isinstance(outcome, Failed):
        return replace(
            outcome, message=cut_at_front(masked_message(outcome.message, assignment.masked_values)), output=output
        )
    return outcome if output is outcome.output else replace(outcome, output=output)


def traced(execute: Execute, traces: OwnTraces, *, host: str) -> Execute:
    """Wraps `execute` to add a span of each run to the operator's traces, below the attempt's own span."""

    async def run(assignment: Assignment) -> Outcome:
        start_ns, ended = time.time_ns(), STOPPED
        try:
            outcome = await execute(assignment)
            ended = outcome.kind.value if isinstance(outcome, Failed) else ""
        finally:
            span = OwnSpan(
                name="fulmen.runner.run",
                trace_id=trace_id_of(assignment.attempt),
                parent_id=span_id_of(assignment.attempt),
                start_ns=start_ns,
                attributes={
                    names.ROLLOUT: assignment.rollout,
                    names.ATTEMPT: assignment.number,
                    "fulmen.agent": assignment.agent,
                    "host.name": host,
                },
                error=ended,
            )
            traces.add(span)
        return outcome

    return run
