"""Scores stored outcomes with another grader, with the runner's own executor. Used by `fulmen rollout rescore`.

No agent runs: the stored outcome takes the place of its return value.

Invariant: rewards, timeout and failure kinds are those that the grader would have in a runner. Nothing is written to the
store.
"""

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from fulmen.ids import DEFAULT_PROJECT, attempt_name, parse_attempt_name, uuid7
from fulmen.runner.v1 import agent_spec_pb2 as pb
from fulmen_runner.agents.library import specification_of
from fulmen_runner.agents.python.host import PythonGrader
from fulmen_runner.agents.specification import Bundle, CommandTarget, inside_runner
from fulmen_runner.attempts.assignment import TEXT_CONTENT_TYPE, Assignment, Mode, decoded_input
from fulmen_runner.attempts.classification import CaptureEvidence
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.executor import AttemptExecutor, Programs
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome, Reward
from fulmen_runner.attempts.program import Answer, Grader, Invocation, Program
from fulmen_runner.attempts.stragglers import Stragglers
from fulmen_runner.once import FixedLibrary
from fulmen_runner.settings import RunnerSettings
from fulmen_runner.wiring.executor import build_executor

__all__ = ["AgentFailed", "Bench", "Regrader", "Stored", "open_regrader"]

_AGENT = "resources/agent.rescore/versions/1"
_BUNDLE = "resources/bundle.rescore/versions/1"
_NOT_RUN = ("false",)
_NO_PROXY_TARGET = "127.0.0.1:1"
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Environment of a grader.

    Attributes:
        archive: The grader's files as a tar.gz; empty if it is installed or a judge.
        archive_sha256_hex: Digest of the archive.
        llm_proxy_url: Model proxy; empty for none.
        key: Key for model calls. Secret.
        timeout_s: Timeout per outcome, in seconds.
    """

    archive: bytes = field(repr=False, default=b"")
    archive_sha256_hex: str = ""
    llm_proxy_url: str = ""
    key: str = field(repr=False, default_factory=lambda: f"fulmen-rescore-{secrets.token_hex(16)}")
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A stored attempt: its input and outcome.

    Attributes:
        attempt: `projects/{project}/rollouts/{uuid}/attempts/{n}`.
        mode: `train`, `validation` or `test`.
        input: The encoded input.
        input_content_type: Media type of the input.
        content: The agent's encoded return value; empty for none.
        content_type: Media type of the content.
        record: Value of `stored` in the grader's context.
    """

    attempt: str
    mode: str
    input: bytes = field(repr=False)
    input_content_type: str
    content: bytes = field(repr=False)
    content_type: str
    record: object = field(repr=False, default=None)


class Regrader:
    """Scores any number of stored outcomes concurrently."""

    def __init__(self, executor: AttemptExecutor, program: Program, bench: Bench) -> None:
        self._executor = executor
        self._program = program
        self._bench = bench

    @property
    def takes_context(self) -> bool:
        """Whether the grader takes the context, which has the whole record."""
        grader = self._program.grader
        return isinstance(grader, PythonGrader) and grader.entry.wants_context

    async def grade(self, stored: Stored) -> dict[str, Any]:
        """Scores one outcome. On cancellation, stops the grader.

        Returns:
            A dictionary for JSON: `failure`, None or with `kind` and `message`, and `rewards`, each with `dimension`,
            `step`, `span_id` and `value`.
        """
        outcome = await self._outcome(stored)
        if isinstance(outcome, Failed):
            return {"failure": {"kind": outcome.kind.value, "message": outcome.message}, "rewards": []}
        return {"failure": None, "rewards": [_as_dict(reward) for reward in outcome.rewards]}

    async def _outcome(self, stored: Stored) -> Outcome:
        # The content type is empty if the agent returned nothing, or the runner did not send it.
        kind = stored.content_type or TEXT_CONTENT_TYPE
        try:
            value = decoded_input(stored.content, kind) if stored.content or stored.content_type else None
        except AgentFailed as error:
            return Failed(kind=FailureKind.AGENT_ERROR, message=f"stored outcome cannot be decoded: {error}")
        assert self._program.grader is not None  # Checked by `open_regrader`.
        program = replace(
            self._program,
            agent=_StoredAnswer(value),
            grader=_WithRecord(self._program.grader, stored.record),
        )
        # Each outcome has its own program.
        return await replace(self._executor, programs=_OneProgram(program)).execute(_assignment(stored, self._bench))


@asynccontextmanager
async def open_regrader(grader: pb.Grader, bench: Bench) -> AsyncIterator[Regrader]:
    """Opens a regrader with its grader loaded.

    Raises:
        AgentFailed: If there is no grader or it cannot be loaded.
    """
    named = specification_of(pb.AgentSpec(grader=grader, command=pb.CommandEntry(argv=_NOT_RUN)), "The grader")
    if named.grader is None:
        raise AgentFailed("no grader is given")
    # In this process: a child would not get the stored record.
    known = replace(inside_runner(named), entry=CommandTarget(argv=_NOT_RUN), bundle=_BUNDLE if bench.archive else "")
    files = Bundle(archive=bench.archive, sha256_hex=bench.archive_sha256_hex)
    async with AsyncExitStack() as stack:
        settings = _settings(bench, await _span_sink(stack))
        executor = build_executor(
            settings, stack, library=FixedLibrary(known, files), captures=_NoCaptures(), stragglers=Stragglers()
        )
        program = await _loaded(executor.programs, bench)
        yield Regrader(executor, program, bench)


async def _loaded(programs: Programs, bench: Bench) -> Program:
    nothing = Stored(
        attempt=attempt_name(DEFAULT_PROJECT, uuid7(), 1),
        mode="test",
        input=b"",
        input_content_type="",
        content=b"",
        content_type="",
    )
    return await programs.resolve(_assignment(nothing, bench))


@dataclass(frozen=True, slots=True)
class _StoredAnswer:
    """An agent that returns a stored value."""

    value: object

    async def run(self, invocation: Invocation) -> Answer:
        """Returns the stored value without its old rewards."""
        return Answer(value=self.value)


@dataclass(frozen=True, slots=True)
class _WithRecord:
    """A grader whose context has the stored record."""

    grader: Grader
    record: object

    async def grade(self, invocation: Invocation, outcome: object) -> tuple[Reward, ...]:
        """Scores the outcome."""
        # The copy shares the mapping of emitted rewards with the current context.
        context = replace(invocation.context, stored=self.record)
        return await self.grader.grade(replace(invocation, context=context), outcome)


@dataclass(frozen=True, slots=True)
class _OneProgram:
    program: Program

    async def resolve(self, assignment: Assignment) -> Program:
        """Returns the one program."""
        return self.program

    async def prompts(self, assignment: Assignment) -> Mapping[str, str]:
        """Returns no prompts."""
        return {}

    async def secrets(self, assignment: Assignment) -> Mapping[str, str]:
        """Returns no secrets."""
        return {}


class _NoCaptures:
    """No proxies: a grader's calls are not recorded with the attempt that it scores."""

    async def reach(self) -> None:
        """Reaches no proxy."""

    async def flush(self, attempt: str) -> CaptureEvidence:
        """Returns an empty summary."""
        return CaptureEvidence()


class _SpanSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Discards the spans of graders: the attempts that they score have ended."""

    async def Export(  # noqa: N802  # The contract's name.
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Accepts and discards the spans."""
        return trace_service_pb2.ExportTraceServiceResponse()


async def _span_sink(stack: AsyncExitStack) -> str:
    """Starts the sink on a free local port; returns its URL."""
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(_SpanSink(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return f"http://127.0.0.1:{port}"


def _assignment(stored: Stored, bench: Bench) -> Assignment:
    name = parse_attempt_name(stored.attempt)
    return Assignment(
        attempt=stored.attempt,
        rollout=name.rollout,
        number=name.number,
        lease_id="",
        epoch=1,
        project="",
        mode=Mode(stored.mode),
        agent=_AGENT,
        input=stored.input,
        input_content_type=stored.input_content_type,
        resource_versions={},
        attempt_key=bench.key,
        timeout_s=bench.timeout_s,
    )


def _settings(bench: Bench, otlp_url: str) -> RunnerSettings:
    values: dict[str, object] = {
        "dev_mode": True,
        # The user's own code, on the user's own machine.
        "isolation": "trusted",
        "llm_proxy_url": bench.llm_proxy_url,
        # Never called: nothing is recorded.
        "llm_proxy_targets": _NO_PROXY_TARGET if bench.llm_proxy_url else "",
        "agents_otlp_url": otlp_url,
        "token": bench.key,
        "flush_s": _FLUSH_S,
    }
    # Other settings in the environment apply here as in a runner, such as the sources of packages.
    return RunnerSettings.model_validate(RunnerSettings.environment_values() | values)


def _as_dict(reward: Reward) -> dict[str, Any]:
    return {
        "dimension": reward.dimension,
        "step": reward.step,
        "span_id": reward.span_id.hex(),
        "value": reward.value,
    }
