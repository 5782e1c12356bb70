"""Agents and graders in a child process: encodes the request and decodes the answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fulmen.agent import WORK_DIR_VARIABLE, RewardKey
from fulmen.attempt_files import PROGRESS_FILE_VARIABLE
from fulmen.emit import RewardInvalid, checked_reward
from fulmen_runner.agents.python.child_frames import Document
from fulmen_runner.agents.python.children import ChildProgram, Children
from fulmen_runner.agents.specification import PythonTarget, Specification
from fulmen_runner.agents.venvs.own_python import Venv
from fulmen_runner.attempts.errors import AgentFailed, HostUnavailable
from fulmen_runner.attempts.outcome import Reward
from fulmen_runner.attempts.program import Answer, Invocation
from fulmen_service_kit.isolation.levels import Isolation


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildAgent:
    """A Python agent in a child."""

    children: Children
    program: ChildProgram

    async def run(self, invocation: Invocation) -> Answer:
        """Calls the agent; its emitted rewards are then in the invocation's context."""
        answer = await _called(self.children, self.program, invocation, outcome=None)
        return Answer(value=answer.get("value"), rewards=_rewards(answer.get("rewards")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildGrader:
    """A Python grader in a child of its own, which the agent cannot reach."""

    children: Children
    program: ChildProgram

    async def grade(self, invocation: Invocation, outcome: object) -> tuple[Reward, ...]:
        """Calls the grader."""
        try:
            return _rewards((await _called(self.children, self.program, invocation, outcome=outcome)).get("rewards"))
        except AgentFailed as error:
            raise AgentFailed(f"grader failed: {error}") from None


def child_program(
    target: PythonTarget,
    directory: Path | None,
    specification: Specification,
    *,
    level: Isolation,
    folder: Path,
    grading: bool,
    venv: Venv | None = None,
) -> ChildProgram:
    """Returns the child program for a Python target of a specification; `folder` holds its attempts' files.

    Raises:
        AgentFailed: If the virtual environment's Python is too old.
    """
    if venv is not None:
        venv.require_callables(target.target)
    return ChildProgram(
        target=target.target,
        directory=directory,
        grading=grading,
        graded=specification.grader is not None,
        environment=tuple(sorted(plain_environment(specification).items())),
        limits=specification.limits,
        level=level,
        folder=folder,
        venv=venv,
    )


def plain_environment(specification: Specification) -> dict[str, str]:
    """Returns the specification's variables without placeholders, which are known before any attempt."""
    return {name: text for name, text in specification.environment.items() if "{" not in text and "}" not in text}


async def _called(children: Children, program: ChildProgram, invocation: Invocation, *, outcome: object) -> Document:
    context, assignment = invocation.context, invocation.assignment
    files = await invocation.workspace.open()
    request = {
        "rollout": context.rollout,
        "attempt": context.attempt,
        "attempt_number": context.attempt_number,
        "attempt_key": assignment.attempt_key,
        "mode": context.mode,
        "remaining_s": context.remaining_s,
        "environment": {
            **context.environment,
            WORK_DIR_VARIABLE: str(files.work_dir),
            PROGRESS_FILE_VARIABLE: str(files.progress_file),
        },
        "resource_versions": dict(context.resource_versions),
        "rewards": _rows(context.rewards),
        "content_type": assignment.input_content_type,
        "outcome": outcome,
    }
    try:
        answer = await children.call(program, request, assignment.input, files, invocation.kept_tails)
    except (TypeError, ValueError, RecursionError) as error:
        raise AgentFailed(f"outcome cannot be sent to the grader's process: {error}") from None
    if answer.get("undelivered_spans"):
        raise HostUnavailable(f"store did not acknowledge {answer['undelivered_spans']} spans of the attempt")
    if "error" in answer:
        raise AgentFailed(str(answer["error"]))
    emitted = _rewards(answer.get("emitted"))
    context.rewards.clear()
    context.rewards.update({(reward.dimension, reward.step, reward.span_id): reward.value for reward in emitted})
    return answer


def _rows(rewards: Mapping[RewardKey, float]) -> list[list[object]]:
    return [[dimension, step, span.hex(), value] for (dimension, step, span), value in rewards.items()]


def _rewards(rows: object) -> tuple[Reward, ...]:
    """Decodes rewards from a child, which the agent may have forged."""
    try:
        found = [(dimension, step, bytes.fromhex(span), value) for dimension, step, span, value in rows]  # type: ignore[attr-defined]  # Checked by the handler.
        return tuple(
            Reward(
                dimension=dimension,
                step=step,
                span_id=span,
                value=checked_reward(value, dimension=dimension, step=step, span_id=span),
            )
            for dimension, step, span, value in found
        )
    except (TypeError, ValueError, RewardInvalid):
        raise AgentFailed("agent process returned a malformed list of rewards") from None
