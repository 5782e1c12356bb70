"""Scores outcomes that the store has with another grader: the same parts as in a runner, with the outcome as it was.

Used by `fulmen rollout rescore`. No agent runs: where an attempt would have one, the stored outcome stands.

Invariant: what a rollout gets here is what the grader would have given in a runner, within the same time limit, and
under the same kinds of failure; nothing is written to the store.
"""

import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from fulmen.ids import attempt_name, parse_attempt_name, rollout_name, uuid7
from fulmen.runner.v1 import agent_spec_pb2 as pb
from fulmen_runner.agents.library import specification_of
from fulmen_runner.agents.python.host import PythonGrader
from fulmen_runner.agents.specification import Bundle, CommandTarget, Specification, inside_runner
from fulmen_runner.app import wire_attempts
from fulmen_runner.attempts.assignment import TEXT_CONTENT_TYPE, Assignment, Mode, decoded_input
from fulmen_runner.attempts.classification import CaptureEvidence, InstanceIds
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.executor import AttemptExecutor, Programs
from fulmen_runner.attempts.outcome import Failed, FailureKind, Outcome, Reward
from fulmen_runner.attempts.program import Answer, Grader, Invocation, Program
from fulmen_runner.attempts.stragglers import Stragglers
from fulmen_runner.settings import RunnerSettings

__all__ = ["AgentFailed", "Bench", "Regrader", "Stored", "open_regrader"]

_AGENT = "resources/agent.rescore/versions/1"
_BUNDLE = "resources/bundle.rescore/versions/1"
_NOT_RUN = ("false",)
_NO_PROXY_TARGET = "127.0.0.1:1"
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Where a grader works.

    Attributes:
        archive: Its files as a tar.gz; empty: it is installed, or a judge.
        archive_sha256_hex: Their digest.
        llm_proxy_url: Where it finds models; empty for none.
        key: For calls to models. Secret.
        timeout_s: How long it may take for one outcome.
    """

    archive: bytes = field(repr=False, default=b"")
    archive_sha256_hex: str = ""
    llm_proxy_url: str = ""
    key: str = field(repr=False, default_factory=lambda: f"fulmen-rescore-{secrets.token_hex(16)}")
    timeout_s: float = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An attempt's input and outcome, as the store has them.

    Attributes:
        attempt: `rollouts/{uuid}/attempts/{n}`.
        mode: `train`, `validation` or `test`.
        content: What the agent returned, encoded by its runner; empty for nothing.
        content_type: The media type of that.
        record: What the grader's context has as `stored`.
    """

    attempt: str
    mode: str
    input: bytes = field(repr=False)
    input_content_type: str
    content: bytes = field(repr=False)
    content_type: str
    record: object = field(repr=False, default=None)


class Regrader:
    """Scores stored outcomes, any number at once."""

    def __init__(self, executor: AttemptExecutor, program: Program, bench: Bench) -> None:
        self._executor = executor
        self._program = program
        self._bench = bench

    @property
    def takes_context(self) -> bool:
        """Tells whether the grader asks for the context, in which the whole record is."""
        grader = self._program.grader
        return isinstance(grader, PythonGrader) and grader.entry.wants_context

    async def grade(self, stored: Stored) -> dict[str, Any]:
        """Scores one outcome; being cancelled, it stops the grader.

        Returns:
            `failure`, with `kind` and `message` or None, and `rewards`, each with `dimension`, `step`, `span_id` and
            `value`: JSON-ready.
        """
        outcome = await self._outcome(stored)
        if isinstance(outcome, Failed):
            return {"failure": {"kind": outcome.kind.value, "message": outcome.message}, "rewards": []}
        return {"failure": None, "rewards": [_as_dict(reward) for reward in outcome.rewards]}

    async def _outcome(self, stored: Stored) -> Outcome:
        # An outcome of no type is what an agent left that returned nothing, or what a runner did not say.
        kind = stored.content_type or TEXT_CONTENT_TYPE
        try:
            value = decoded_input(stored.content, kind) if stored.content or stored.content_type else None
        except AgentFailed as error:
            return Failed(kind=FailureKind.AGENT_ERROR, message=f"The stored outcome cannot be read. {error}")
        assert self._program.grader is not None  # `open_regrader` has seen to it.
        program = replace(
            self._program,
            agent=_StoredAnswer(value),
            grader=_WithRecord(self._program.grader, stored.record),
        )
        # One executor for each: which program runs is the only difference between them.
        return await replace(self._executor, programs=_OneProgram(program)).execute(_assignment(stored, self._bench))


@asynccontextmanager
async def open_regrader(grader: pb.Grader, bench: Bench) -> AsyncIterator[Regrader]:
    """Makes what scores, loads the grader, and stops everything at the end.

    Raises:
        AgentFailed: If there is no grader, or it cannot be loaded.
    """
    named = specification_of(pb.AgentSpec(grader=grader, command=pb.CommandEntry(argv=_NOT_RUN)), "The grader")
    if named.grader is None:
        raise AgentFailed("No grader is named.")
    # Inside: a child would not get the record of what is scored.
    known = replace(inside_runner(named), entry=CommandTarget(argv=_NOT_RUN), bundle=_BUNDLE if bench.archive else "")
    files = Bundle(archive=bench.archive, sha256_hex=bench.archive_sha256_hex)
    async with AsyncExitStack() as stack:
        settings = _settings(bench, await _span_sink(stack))
        executor = wire_attempts(
            settings, stack, library=_Library(known, files), captures=_NoCaptures(), stragglers=Stragglers()
        )
        program = await _loaded(executor.programs, bench)
        yield Regrader(executor, program, bench)


async def _loaded(programs: Programs, bench: Bench) -> Program:
    nothing = Stored(
        attempt=attempt_name(uuid7(), 1), mode="test", input=b"", input_content_type="", content=b"", content_type=""
    )
    return await programs.resolve(_assignment(nothing, bench))


@dataclass(frozen=True, slots=True)
class _StoredAnswer:
    """Stands where the agent would run."""

    value: object

    async def run(self, invocation: Invocation) -> Answer:
        """Returns the outcome as it was; its old rewards do not count."""
        return Answer(value=self.value)


@dataclass(frozen=True, slots=True)
class _WithRecord:
    """Gives the grader's context what the store has of the attempt."""

    grader: Grader
    record: object

    async def grade(self, invocation: Invocation, outcome: object) -> tuple[Reward, ...]:
        """Scores; what the grader emits is kept in the same mapping."""
        # The mapping of emitted rewards is shared with the context that is the current one.
        context = replace(invocation.context, stored=self.record)
        return await self.grader.grade(replace(invocation, context=context), outcome)


@dataclass(frozen=True, slots=True)
class _OneProgram:
    program: Program

    async def resolve(self, assignment: Assignment) -> Program:
        """Returns the one program."""
        return self.program


@dataclass(frozen=True, slots=True)
class _Library:
    known: Specification
    files: Bundle

    async def specification(self, name: str, project: str) -> Specification:
        """Returns the one agent."""
        return self.known

    async def bundle(self, name: str, project: str) -> Bundle:
        """Returns its files."""
        return self.files

    async def prompts(self, assignment: Assignment) -> Mapping[str, str]:
        """Returns none: its attempts name no resources."""
        return {}


class _NoCaptures:
    """Stands for the model proxies: calls of graders are never recorded with the attempt that they score."""

    async def instances(self) -> InstanceIds:
        """Returns nobody."""
        return ()

    async def flush(self, attempt: str) -> CaptureEvidence:
        """Returns that there was no call."""
        return CaptureEvidence()


class _SpanSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes the spans of graders and keeps none: the attempts that they score are over."""

    async def Export(  # noqa: N802  # The contract's name.
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: object
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Answers that all is well."""
        return trace_service_pb2.ExportTraceServiceResponse()


async def _span_sink(stack: AsyncExitStack) -> str:
    """Starts the sink on a free port of this machine; returns its URL."""
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
        rollout=rollout_name(name.rollout_id),
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
    values: Mapping[str, object] = {
        "dev_mode": True,
        "llm_proxy_url": bench.llm_proxy_url,
        # Never asked: nothing is recorded.
        "llm_proxy_targets": _NO_PROXY_TARGET if bench.llm_proxy_url else "",
        "agents_otlp_url": otlp_url,
        "token": bench.key,
        "flush_s": _FLUSH_S,
    }
    return RunnerSettings.model_validate(values)


def _as_dict(reward: Reward) -> dict[str, Any]:
    return {
        "dimension": reward.dimension,
        "step": reward.step,
        "span_id": reward.span_id.hex(),
        "value": reward.value,
    }
