"""What the store adds to a rollout's trace."""

from __future__ import annotations

from uuid import UUID

from opentelemetry.trace import StatusCode

from fulmen.ids import DEFAULT_PROJECT, attempt_name, rollout_name, span_id_of, trace_id_of, uuid7, uuid7_unix_ms
from fulmen_store.leases.leases import EndedAttempt
from fulmen_store.rollouts.transitions import FailureKind, RolloutState
from fulmen_store.scheduling.backlog import ReadyItem
from fulmen_store.spans.chunks import Chunk, NewChunk
from fulmen_store.traces import RolloutTraces
from tests.support.service_kit.own_traces import KeptTraces, id_of, parent_of
from tests.support.store.project_names import known_projects

LATER_MS = 5_000


def ended(rollout_id: UUID, epoch: int, kind: FailureKind, state: RolloutState) -> EndedAttempt:
    item = ReadyItem(rollout_id=rollout_id, project_id=1)
    return EndedAttempt(item=item, session_id=uuid7(), epoch=epoch, kind=kind, rollout_state=state, duration_s=2.0)


def test_a_rollout_that_is_tried_twice_is_one_tree() -> None:
    kept = KeptTraces()
    rollout_id = uuid7()
    rollout = rollout_name(DEFAULT_PROJECT, rollout_id)
    traces = RolloutTraces(kept.traces, known_projects())
    traces.ended([ended(rollout_id, 1, FailureKind.TIMEOUT, RolloutState.RETRY_WAIT)])
    assert [span.name for span in kept.spans] == ["fulmen.store.queue", "fulmen.attempt"]
    traces.ended([ended(rollout_id, 2, FailureKind.NONE, RolloutState.SUCCEEDED)])

    attempts = kept.named("fulmen.attempt")
    [root] = kept.named("fulmen.rollout")
    assert [id_of(span) for span in attempts] == [
        span_id_of(attempt_name(DEFAULT_PROJECT, rollout_id, n)) for n in (1, 2)
    ]
    assert [span.status.description for span in attempts] == ["TIMEOUT", None]
    assert (id_of(root), parent_of(root)) == (span_id_of(rollout), "")
    assert {parent_of(span) for span in kept.spans if span is not root} == {id_of(root)}
    assert {f"{span.context.trace_id:032x}" for span in kept.spans if span.context} == {trace_id_of(rollout)}
    assert root.status.status_code is StatusCode.UNSET


def test_a_rollout_that_fails_for_good_says_so() -> None:
    kept = KeptTraces()
    RolloutTraces(kept.traces, known_projects()).ended(
        [ended(uuid7(), 1, FailureKind.AGENT_ERROR, RolloutState.FAILED)]
    )
    [root] = kept.named("fulmen.rollout")
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "FAILED")


def test_an_attempt_has_the_time_of_its_lease_and_the_queue_the_time_before() -> None:
    kept = KeptTraces()
    # Created so long ago that it waited, and leased for two seconds of it.
    rollout_id = uuid7(uuid7_unix_ms(uuid7()) - LATER_MS)
    RolloutTraces(kept.traces, known_projects()).ended([ended(rollout_id, 1, FailureKind.NONE, RolloutState.SUCCEEDED)])
    [attempt], [queue] = kept.named("fulmen.attempt"), kept.named("fulmen.store.queue")
    assert attempt.start_time is not None
    assert attempt.end_time == attempt.start_time + 2_000_000_000
    assert queue.start_time == uuid7_unix_ms(rollout_id) * 1_000_000
    assert queue.end_time == attempt.start_time


def test_stored_spans_are_counted_below_their_attempt() -> None:
    kept = KeptTraces()
    rollout_id = uuid7()
    chunk = Chunk(
        rollout_id=rollout_id, attempt=3, chunk_id=uuid7(), span_count=17, codec=2, start_ns=1, end_ns=2, payload=b"x"
    )
    RolloutTraces(kept.traces, known_projects()).stored([NewChunk(chunk=chunk, project=DEFAULT_PROJECT)], 5)
    [span] = kept.spans
    assert span.attributes is not None
    assert (span.name, span.attributes["fulmen.span_count"], span.start_time) == ("fulmen.store.spans", 17, 5)
    assert parent_of(span) == span_id_of(attempt_name(DEFAULT_PROJECT, rollout_id, 3))
