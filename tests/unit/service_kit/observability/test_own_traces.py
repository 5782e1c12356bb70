"""Spans whose places are known beforehand; and which traces the lines of a log are in."""

from __future__ import annotations

import json
import time

import pytest
import structlog
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBasedTraceIdRatio
from opentelemetry.trace import StatusCode

from fulmen.ids import DEFAULT_PROJECT, attempt_name, rollout_name, span_id_of, trace_id_of, uuid7, uuid7s
from fulmen_service_kit.observability.logs import configure_logs
from fulmen_service_kit.observability.own_traces import OwnSpan
from tests.support.service_kit.own_traces import KeptTraces, id_of, parent_of

ROLLOUT = rollout_name(DEFAULT_PROJECT, uuid7())
ATTEMPT = f"{ROLLOUT}/attempts/1"


def test_a_span_lies_where_it_is_put() -> None:
    kept = KeptTraces()
    before = time.time_ns()
    kept.traces.add(
        OwnSpan(
            name="x",
            trace_id=trace_id_of(ROLLOUT),
            span_id="00000000000000ab",
            parent_id=span_id_of(ATTEMPT),
            start_ns=5,
        )
    )
    [span] = kept.spans
    assert span.context is not None
    assert (
        f"{span.context.trace_id:032x}"
        == trace_id_of(ROLLOUT)
        == ROLLOUT.removeprefix("projects/default/rollouts/").replace("-", "")
    )
    assert (id_of(span), parent_of(span)) == ("00000000000000ab", span_id_of(ATTEMPT))
    assert span.start_time == 5
    assert span.end_time is not None
    assert span.end_time >= before
    assert span.resource.attributes["service.name"] == "fulmen-tests"
    assert span.status.status_code is StatusCode.UNSET


def test_a_span_has_its_own_id_and_the_error_it_ended_with() -> None:
    kept = KeptTraces()
    for error in ("", "TIMEOUT"):
        kept.traces.add(OwnSpan(name="x", trace_id=trace_id_of(ROLLOUT), start_ns=1, end_ns=2, error=error))
    good, bad = kept.spans
    assert id_of(good) != id_of(bad)
    assert (good.status.status_code, bad.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert bad.status.description == "TIMEOUT"


def test_services_with_the_same_sampling_keep_the_same_rollouts() -> None:
    store, proxy = (KeptTraces(ParentBasedTraceIdRatio(0.25)) for _ in range(2))
    for rollout_id in uuid7s(400):
        attempt = attempt_name(DEFAULT_PROJECT, rollout_id, 1)
        store.traces.add(OwnSpan(name="a", trace_id=trace_id_of(attempt), start_ns=1))
        proxy.traces.add(OwnSpan(name="b", trace_id=trace_id_of(attempt), parent_id=span_id_of(attempt), start_ns=1))
    kept = [{span.context.trace_id for span in one.spans if span.context} for one in (store, proxy)]
    assert kept[0] == kept[1]
    assert 50 < len(kept[0]) < 150
    off = KeptTraces(ALWAYS_OFF)
    off.traces.add(OwnSpan(name="x", trace_id=trace_id_of(ROLLOUT), start_ns=1))
    assert not off.spans


@pytest.mark.parametrize("key", ["attempt", "rollout"])
def test_a_line_about_an_attempt_is_in_the_trace_of_its_rollout(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    configured = structlog.get_config()
    try:
        configure_logs(service="tests", log_format="json", level="info")
        structlog.get_logger().info("happened", **{key: ATTEMPT if key == "attempt" else ROLLOUT})
        structlog.get_logger().info("happened", **{key: "of no such form"})
    finally:
        structlog.configure(**configured)
    told, other = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert told["trace_id"] == trace_id_of(ROLLOUT)
    assert "trace_id" not in other
