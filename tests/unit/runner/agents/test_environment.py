"""The environment of agents."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from urllib.parse import unquote

from fulmen.ids import trace_id_of
from fulmen_runner.agents.environment import QUIET, Endpoints, inherited_environment, network_environment, traceparent
from fulmen_runner.agents.kubernetes.manifest import JobOrder, job_of, secret_of
from fulmen_runner.agents.kubernetes.template import read_template
from fulmen_runner.agents.specification import Limits
from fulmen_runner.agents.templates import Placeholders
from fulmen_service_kit.ownership import Owner
from tests.support.runner.assignments import assignment

ENDPOINTS = Endpoints(
    llm_proxy_url="http://proxy:7200/", otlp_url="http://store:7101", otlp_http_url="http://store:7103"
)


def test_an_agent_finds_models_tracing_and_its_task() -> None:
    item = assignment(input_=b'{"question": "why"}', key="the-key")
    found = ENDPOINTS.attempt_environment(item)
    assert unquote(found.pop("OTEL_EXPORTER_OTLP_HEADERS")) == "authorization=Bearer the-key"
    assert found == {
        "OPENAI_BASE_URL": "http://proxy:7200/v1",
        "OPENAI_API_KEY": "the-key",
        "ANTHROPIC_BASE_URL": "http://proxy:7200",
        "ANTHROPIC_API_KEY": "the-key",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://store:7101",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
        "FULMEN_TRACES_URL": "http://store:7103/v1/traces",
        "TRACEPARENT": traceparent(item.attempt),
        "FULMEN_ROLLOUT": item.rollout,
        "FULMEN_ATTEMPT": "1",
        "FULMEN_TASK": '{"question": "why"}',
    }


def test_an_attempts_secrets_are_variables_that_replace_none_of_its_own_and_no_repr_shows_them() -> None:
    item = replace(assignment(key="the-key"), secrets={"WEATHER_KEY": "sunny-and-warm", "OPENAI_API_KEY": "sk-vendor"})
    found = ENDPOINTS.attempt_environment(item)
    assert (found["WEATHER_KEY"], found["OPENAI_API_KEY"]) == ("sunny-and-warm", "the-key")
    assert "sunny-and-warm" not in repr(item)
    assert "WEATHER_KEY" not in ENDPOINTS.attempt_environment(assignment())


def test_a_job_refers_to_its_attempts_secrets_and_its_manifest_holds_none() -> None:
    item = replace(assignment(), secrets={"WEATHER_KEY": "sunny-and-warm"})
    order = JobOrder(
        name="fulmen-1",
        rollout_id="1",
        attempt=item.attempt,
        owner=Owner.this_process("host"),
        variables=ENDPOINTS.attempt_environment(item),
        defaults={},
        input=item.input,
        timeout_s=item.timeout_s,
        ttl_s=60,
        limits=Limits(memory_bytes=1 << 20, cpu_count=1),
        requested_limits=Limits(),
        created_unix_s=0.0,
    )
    pod = {"containers": [{"name": "agent", "image": "agents/mine:1"}]}
    text = json.dumps({"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": {"spec": pod}}})
    template = read_template(text, host_access=False, max_limits=Limits(memory_bytes=1 << 30, cpu_count=2))
    job = job_of(template, Placeholders(input=item.input, task={}, named={}), order)
    encoded = base64.b64encode(b"sunny-and-warm").decode()
    assert secret_of(order, job={"metadata": {"name": "fulmen-1", "uid": "u"}})["data"]["WEATHER_KEY"] == encoded
    assert "WEATHER_KEY" in json.dumps(job)
    assert not {"sunny-and-warm", encoded} & set(json.dumps(job).split('"'))


def test_a_task_that_no_variable_can_hold_is_left_out() -> None:
    assert "FULMEN_TASK" not in ENDPOINTS.attempt_environment(assignment(input_=b"x" * 100_001))
    assert "FULMEN_TASK" not in ENDPOINTS.attempt_environment(assignment(input_=b"a\0b"))


def test_the_trace_is_named_after_the_rollout() -> None:
    item = assignment()
    version, trace_id, span_id, flags = traceparent(item.attempt).split("-")
    assert (version, flags) == ("00", "01")
    assert trace_id == trace_id_of(item.rollout)
    assert len(span_id) == 16


def test_commands_get_an_allow_list_of_the_runners_environment() -> None:
    environ = {"PATH": "/bin", "HOME": "/root", "FULMEN_RUNNER_TOKEN": "secret", "AWS_SECRET": "secret", "MINE": "1"}
    found = inherited_environment(["MINE"], environ)
    assert found.keys() - QUIET.keys() == {"PATH", "HOME", "MINE"}
    assert found["PATH"].endswith(":/bin")
    # Frameworks' telemetry is off unless the runner's own environment enables it.
    assert found["OPENAI_AGENTS_DISABLE_TRACING"] == "1"
    assert inherited_environment([], {"LANGSMITH_TRACING": "true"})["LANGSMITH_TRACING"] == "true"


def test_the_key_is_in_no_representation() -> None:
    assert "secret-key" not in repr(assignment(key="secret-key"))


def test_calls_to_our_own_hosts_go_past_a_proxy_of_the_network() -> None:
    environ = {"https_proxy": "http://gate:3128", "NO_PROXY": "example.org, proxy", "no_proxy": ".internal"}
    expected = "example.org,proxy,.internal,store"
    assert network_environment(ENDPOINTS, environ) == {"NO_PROXY": expected, "no_proxy": expected}


def test_without_a_proxy_of_the_network_or_with_all_hosts_past_it_nothing_is_set() -> None:
    assert network_environment(ENDPOINTS, {"NO_PROXY": "x"}) == {}
    assert network_environment(ENDPOINTS, {"HTTP_PROXY": "http://gate", "NO_PROXY": "*"}) == {}
