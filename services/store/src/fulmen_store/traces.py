"""Spans of rollouts for the operator's traces: time in the queue, attempts, stored spans."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from fulmen.ids import attempt_name, attempt_of, rollout_name, span_id_of, trace_id_of, uuid7_unix_ms
from fulmen.spans import attributes as names
from fulmen_service_kit.observability.own_traces import OwnSpan, OwnTraces
from fulmen_store.leases.leases import EndedAttempt
from fulmen_store.projects.names import ProjectNames
from fulmen_store.rollouts.transitions import FINAL_STATES, FailureKind, RolloutState
from fulmen_store.spans.chunks import NewChunk

__all__ = ["RolloutTraces"]

_NS: Final = 1_000_000_000
_MS: Final = 1_000_000


class RolloutTraces:
    """Adds the parent spans of the spans of runners, proxies and backends."""

    def __init__(self, traces: OwnTraces, projects: ProjectNames) -> None:
        self._traces = traces
        self._projects = projects

    def ended(self, attempts: Sequence[EndedAttempt]) -> None:
        """Adds attempts that ended, and the rollouts that ended with them."""
        now_ns = time.time_ns()
        for one in attempts:
            if not self._traces.keeps(one.item.rollout_id.hex):
                continue
            self._attempt(one, now_ns)
            if one.rollout_state in FINAL_STATES:
                self._rollout(one, now_ns)

    def stored(self, chunks: Sequence[NewChunk], start_ns: int) -> None:
        """Adds, to the attempt of each chunk, that its spans were stored."""
        for new in chunks:
            chunk = new.chunk
            if not self._traces.keeps(chunk.rollout_id.hex):
                continue
            attempt = attempt_name(new.project, chunk.rollout_id, chunk.attempt)
            self._traces.add(
                OwnSpan(
                    name="fulmen.store.spans",
                    trace_id=trace_id_of(attempt),
                    parent_id=span_id_of(attempt),
                    start_ns=start_ns,
                    attributes={names.SPAN_COUNT: chunk.span_count},
                )
            )

    def _attempt(self, one: EndedAttempt, now_ns: int) -> None:
        rollout_id = one.item.rollout_id
        rollout = rollout_name(self._projects.name(one.item.project_id), rollout_id)
        attempt = attempt_of(rollout, one.epoch)
        leased_ns = now_ns - int(one.duration_s * _NS)
        failure = "" if one.kind is FailureKind.NONE else one.kind.name
        trace_id, parent_id = trace_id_of(rollout), span_id_of(rollout)
        if one.epoch == 1:
            # The id of a rollout holds its creation time; when later attempts could begin is unknown.
            created_ns = min(uuid7_unix_ms(rollout_id) * _MS, leased_ns)
            self._traces.add(
                OwnSpan(
                    name="fulmen.store.queue",
                    trace_id=trace_id,
                    parent_id=parent_id,
                    start_ns=created_ns,
                    end_ns=leased_ns,
                )
            )
        self._traces.add(
            OwnSpan(
                name="fulmen.attempt",
                trace_id=trace_id,
                span_id=span_id_of(attempt),
                parent_id=parent_id,
                start_ns=leased_ns,
                end_ns=now_ns,
                attributes={names.ROLLOUT: rollout, names.ATTEMPT: one.epoch},
                error=failure,
            )
        )

    def _rollout(self, one: EndedAttempt, now_ns: int) -> None:
        rollout = rollout_name(self._projects.name(one.item.project_id), one.item.rollout_id)
        self._traces.add(
            OwnSpan(
                name="fulmen.rollout",
                trace_id=trace_id_of(rollout),
                span_id=span_id_of(rollout),
                start_ns=min(uuid7_unix_ms(one.item.rollout_id) * _MS, now_ns),
                end_ns=now_ns,
                attributes={names.ROLLOUT: rollout},
                error="" if one.rollout_state is RolloutState.SUCCEEDED else one.rollout_state.name,
            )
        )
