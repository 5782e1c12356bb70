"""Runs attempts of one agent without a store, with the runner's own executor. Used by `fulmen agent check`.

The agent's Python callables run in the calling thread, so that breakpoints have the terminal; everything else runs in
another thread.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from fulmen.ids import DEFAULT_PROJECT, attempt_of, rollout_name, uuid7
from fulmen.runner.v1 import agent_spec_pb2 as pb
from fulmen_runner.agents.library import specification_of
from fulmen_runner.agents.python.loader import load_through
from fulmen_runner.agents.python.main_thread import MainThread
from fulmen_runner.agents.specification import Bundle, PythonTarget, Specification, inside_runner
from fulmen_runner.attempts.assignment import Assignment, Mode
from fulmen_runner.attempts.classification import CaptureEvidence
from fulmen_runner.attempts.outcome import Failed, Outcome
from fulmen_runner.attempts.stragglers import Stragglers
from fulmen_runner.settings import RunnerSettings
from fulmen_runner.wiring.executor import build_executor

NO_TIMEOUT_S = 30 * 86400.0
"""Effectively unlimited: long enough for a breakpoint over a weekend."""

FLUSH_S = 10.0
_AGENT = "resources/agent.check/versions/1"
_BUNDLE = "resources/bundle.check/versions/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """An ended attempt.

    Attributes:
        rollout: Name of the rollout.
        outcome: Outcome of the attempt.
        seconds: Duration.
    """

    rollout: str
    outcome: Outcome
    seconds: float

    def as_dict(self) -> dict[str, object]:
        """Returns a dictionary for JSON."""
        outcome = self.outcome
        failed = isinstance(outcome, Failed)
        rewards = () if isinstance(outcome, Failed) else outcome.rewards
        return {
            "rollout": self.rollout,
            "state": "failed" if failed else "succeeded",
            "failure": {"kind": outcome.kind.value, "message": outcome.message}
            if isinstance(outcome, Failed)
            else None,
            "rewards": [
                {"dimension": each.dimension, "step": each.step, "span_id": each.span_id.hex(), "value": each.value}
                for each in rewards
            ],
            "outcome": outcome.output.content.decode(errors="replace"),
            "seconds": round(self.seconds, 6),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Environment of an offline run.

    Attributes:
        folder: The agent's files; Python callables are loaded from there.
        archive: The same files as a tar.gz, for agents in other processes; empty to run those in the working directory.
        archive_sha256_hex: Digest of the archive.
        llm_proxy_url: Model proxy.
        otlp_url: Receiver of spans, OTLP over gRPC.
        calls_of: Returns the number of an attempt's model calls, and of those that failed because of the infrastructure.
        timeout_s: Timeout of an attempt, in seconds; None for none.
        secrets: The agent's secrets by variable.
        attempt_key: Returns a new attempt key.
    """

    folder: Path
    archive: bytes = field(repr=False)
    archive_sha256_hex: str
    llm_proxy_url: str
    otlp_url: str
    calls_of: Callable[[str], tuple[int, int]]
    timeout_s: float | None = None
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)
    attempt_key: Callable[[], str] = field(default=lambda: f"fulmen-check-{secrets.token_hex(16)}", repr=False)


def run_attempts(
    spec: pb.AgentSpec,
    inputs: Sequence[tuple[bytes, str]],
    stage: Stage,
    *,
    on_start: Callable[[str, str], None],
    on_end: Callable[[dict[str, object]], None],
) -> None:
    """Runs attempts one after another; for the main thread.

    Args:
        spec: Specification of the agent.
        inputs: Input and content type of each attempt.
        stage: Environment of the run.
        on_start: Called with each attempt's rollout and key.
        on_end: Called with each ended attempt; see `Ended.as_dict`.

    Raises:
        AgentFailed: If the specification is invalid.
        KeyboardInterrupt: On Ctrl-C.
    """
    main = MainThread()
    load_through(lambda target, _: main.load(target, stage.folder))
    library = FixedLibrary(
        _specification(spec, packed=bool(stage.archive)),
        Bundle(archive=stage.archive, sha256_hex=stage.archive_sha256_hex),
        stage.secrets,
    )
    assignments = [_assignment(data, content_type, stage) for data, content_type in inputs]
    failures: list[BaseException] = []

    async def attempts() -> None:
        async with AsyncExitStack() as stack:
            executor = build_executor(
                _settings(stage), stack, library=library, captures=_Captures(stage.calls_of), stragglers=Stragglers()
            )
            for assignment in assignments:
                on_start(assignment.rollout, assignment.attempt_key)
                started = time.monotonic()
                outcome = await executor.execute(assignment)
                on_end(Ended(rollout=assignment.rollout, outcome=outcome, seconds=time.monotonic() - started).as_dict())

    def background() -> None:
        try:
            asyncio.run(attempts())
        except BaseException as error:  # noqa: BLE001  # Raised again in the thread that waits.
            failures.append(error)
        finally:
            main.end()

    thread = threading.Thread(target=background, name="attempts", daemon=True)
    thread.start()
    main.serve()
    thread.join(FLUSH_S)
    if failures:
        raise failures[0]


@dataclass(frozen=True, slots=True)
class FixedLibrary:
    """A library of one agent, without prompts."""

    known: Specification
    files: Bundle
    values: Mapping[str, str] = field(default_factory=dict, repr=False)

    async def specification(self, name: str, project: str) -> Specification:
        """Returns the one agent."""
        return self.known

    async def bundle(self, name: str, project: str) -> Bundle:
        """Returns the agent's files."""
        return self.files

    async def prompts(self, assignment: Assignment) -> Mapping[str, str]:
        """Returns no prompts."""
        return {}

    async def secrets(self, assignment: Assignment) -> Mapping[str, str]:
        """Returns the agent's secrets."""
        return self.values


@dataclass(frozen=True, slots=True)
class _Captures:
    count: Callable[[str], tuple[int, int]]

    async def reach(self) -> None:
        """Reaches no proxy: calls are recorded in this process."""

    async def flush(self, attempt: str) -> CaptureEvidence:
        """Returns the recorded counts."""
        calls, failed = self.count(attempt)
        return CaptureEvidence(call_count=calls, infra_failure_count=failed)


def _specification(spec: pb.AgentSpec, *, packed: bool) -> Specification:
    """Returns the specification for an offline run: Python in this process, from the agent's folder.

    An agent with a virtual environment has a process of its own, and its bundle.
    """
    known = inside_runner(specification_of(spec, "The agent"))
    packed = packed and (known.venv is not None or not isinstance(known.entry, PythonTarget))
    return replace(known, bundle=_BUNDLE if packed else "")


def _assignment(data: bytes, content_type: str, stage: Stage) -> Assignment:
    rollout = rollout_name(DEFAULT_PROJECT, uuid7())
    return Assignment(
        attempt=attempt_of(rollout, 1),
        rollout=rollout,
        number=1,
        lease_id="",
        epoch=1,
        project="",
        mode=Mode.TEST,
        agent=_AGENT,
        input=data,
        input_content_type=content_type,
        resource_versions={},
        attempt_key=stage.attempt_key(),
        timeout_s=stage.timeout_s or NO_TIMEOUT_S,
    )


def _settings(stage: Stage) -> RunnerSettings:
    values: dict[str, object] = {
        "dev_mode": True,
        # The user's own code, on the user's own machine.
        "isolation": "trusted",
        "llm_proxy_url": stage.llm_proxy_url,
        "llm_proxy_targets": "127.0.0.1:1",  # Never called: calls are recorded by the caller.
        "agents_otlp_url": stage.otlp_url,
        "token": "check",
        "flush_s": FLUSH_S,
    }
    # Other settings in the environment apply here as in a runner, such as the sources of packages.
    return RunnerSettings.model_validate(RunnerSettings.environment_values() | values)
