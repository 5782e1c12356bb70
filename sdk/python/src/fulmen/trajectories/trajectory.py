"""The trajectory of an attempt: its rows and its dropped calls.

Invariant: every model call of the attempt is in exactly one row or in `dropped`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fulmen.model_call import ModelCall
from fulmen.store.v1.span_pb2 import SpanChunk
from fulmen.trajectories.calls import DroppedCall, DropReason, drop_reasons
from fulmen.trajectories.reading import read_attempt
from fulmen.trajectories.roles import SpanTree
from fulmen.trajectories.rows import BreakReason, Row, merge


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The rows of one attempt, in order of their first call, with its breaks and dropped calls.

    Attributes:
        rows: Training rows.
        breaks: Number of further rows of the same agent, by reason.
        dropped: Calls in no row, in order of start.
        tree: All spans of the attempt.
    """

    rows: tuple[Row, ...]
    breaks: Mapping[BreakReason, int]
    dropped: tuple[DroppedCall, ...] = ()
    tree: SpanTree = field(default_factory=SpanTree, repr=False, compare=False)

    @property
    def drops(self) -> Mapping[DropReason, int]:
        """Number of dropped calls by reason."""
        return Counter(each.reason for each in self.dropped)

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents or roles with rows, in order of their first row."""
        return tuple(dict.fromkeys(row.agent_name for row in self.rows))

    def of_agent(self, name: str) -> tuple[Row, ...]:
        """Returns the rows of one agent or role."""
        return tuple(row for row in self.rows if row.agent_name == name)


def trajectories(chunks: Iterable[SpanChunk]) -> dict[str, Trajectory]:
    """Builds the trajectory of every attempt with spans in the chunks, by attempt name.

    The order of the chunks does not matter; repeated chunks and spans count once.

    Raises:
        ModelCallInvalid: If a record is inconsistent or a chunk cannot be decompressed.
    """
    by_attempt: dict[str, dict[str, SpanChunk]] = {}
    for chunk in chunks:
        by_attempt.setdefault(chunk.attempt, {})[chunk.chunk_id] = chunk
    return {name: trajectory(unique.values()) for name, unique in by_attempt.items()}


def trajectory(chunks: Iterable[SpanChunk]) -> Trajectory:
    """Builds the trajectory of one attempt from all its chunks; see `trajectories`."""
    spans = read_attempt(chunks)
    return assemble(spans.calls, tree=spans.tree, failed=spans.failed)


def assemble(calls: Sequence[ModelCall], *, tree: SpanTree | None = None, failed: Sequence[Span] = ()) -> Trajectory:
    """Merges calls into rows.

    Args:
        calls: All calls of the attempt, in order of start.
        tree: All its spans; None if only the calls are known.
        failed: Spans of failed calls.
    """
    tree = SpanTree.of_calls(calls) if tree is None else tree
    reasons = drop_reasons(calls, failed)
    steps = _steps(calls, reasons, tree)
    kept = [index for index, reason in enumerate(reasons) if reason is None]
    rows, breaks = merge([calls[index] for index in kept], [steps[index] for index in kept])
    dropped = tuple(
        DroppedCall(call=call, reason=reason, step=step)
        for call, reason, step in zip(calls, reasons, steps, strict=True)
        if reason is not None
    )
    return Trajectory(rows=rows, breaks=breaks, dropped=dropped, tree=tree)


_NO_STEP = frozenset({DropReason.ORPHANED, DropReason.GRADER, DropReason.NOT_TRAINABLE})


def _steps(calls: Sequence[ModelCall], reasons: Sequence[DropReason | None], tree: SpanTree) -> list[int | None]:
    """Returns the step of each call.

    If any answer of the policy that the agent saw lies in a span with a step, the step of every call is the step of
    its nearest enclosing span with one, and calls outside such spans have no step. Otherwise the steps are the
    policy's answers that the agent saw, of all its roles, counted from 0 in order of start; the choices of one answer
    are one step. Answers that were not captured completely count, too.
    """
    named = [tree.step(call.span_id) for call in calls]
    if any(step is not None and reason not in _NO_STEP for step, reason in zip(named, reasons, strict=True)):
        return named
    found: list[int | None] = []
    count = -1
    for call, reason in zip(calls, reasons, strict=True):
        if reason in _NO_STEP:
            found.append(None)
            continue
        before = calls[len(found) - 1] if found else None
        is_choice = call.choice and before is not None and _one_answer(before, call) and found[-1] is not None
        count += not is_choice
        found.append(count)
    return found


def _one_answer(one: ModelCall, other: ModelCall) -> bool:
    return (one.start_time_ns, one.parent_span_id, one.request_json) == (
        other.start_time_ns,
        other.parent_span_id,
        other.request_json,
    )
