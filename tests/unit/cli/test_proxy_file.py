"""`proxy.toml` becomes backends and routes, or every problem of it at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fulmen.kinds import backend_problems, route_problems
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen.train_toml.reader import ConfigError
from fulmen_cli.proxy.file_format import ProxyFile, read_proxy_file

WHOLE = """
[[backend]]
name = "azure.eu"
base_url = "https://example.openai.azure.com"
dialect = "azure-openai"
api_version = "2024-10-21"
apis = ["chat-completions", "responses"]
key_name = "azure"
engine = "vllm"
returns_token_ids = true
health_path = "/health"
max_in_flight = 64
requests_per_minute = 600
tokens_per_minute = 90000

[[backend]]
name = "claude"
base_url = "https://bedrock.example.com"
dialect = "litellm"
provider = "bedrock"
region = "eu-central-1"

[[route]]
model = "gpt-4.1"
balancing = "prefix-cache"
fallbacks = ["other"]
deadline_s = 60
hedge_delay_s = 0.25
cached = true

[[route.targets]]
backend = "azure.eu"
model = "deployment-1"
weight = 3

[[route.targets]]
backend = "azure.eu"
weight = 0

[route.overrides]
train = { temperature = 1.0 }
validation = '{"temperature": 0, "top_p": null}'

[route.recording]
sample_rate = 0.5
redact = ["email"]
patterns = { customer = "C-[0-9]{6}" }
retention_days = 7

[[route]]
model = "other"
targets = [{ backend = "azure.eu", policy = "arithmetic", policy_version = 4 }]
"""


def read(text: str, tmp_path: Path) -> ProxyFile:
    file = tmp_path / "proxy.toml"
    file.write_text(text, encoding="utf-8")
    return read_proxy_file(file)


def problems(text: str, tmp_path: Path) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(text, tmp_path)
    return list(error.value.problems)


def test_every_key_reaches_the_backend_or_route_that_it_describes(tmp_path: Path) -> None:
    found = read(WHOLE, tmp_path)

    assert found.name == "proxy.toml"
    backend, through_litellm = found.backends
    assert through_litellm == backend_pb2.Backend(
        name="backends/claude",
        base_url="https://bedrock.example.com",
        dialect=backend_pb2.DIALECT_LITELLM,
        provider="bedrock",
        region="eu-central-1",
    )
    assert backend == backend_pb2.Backend(
        name="backends/azure.eu",
        base_url="https://example.openai.azure.com",
        dialect=backend_pb2.DIALECT_AZURE_OPENAI,
        api_version="2024-10-21",
        apis=[backend_pb2.API_CHAT_COMPLETIONS, backend_pb2.API_RESPONSES],
        key_name="azure",
        engine=backend_pb2.ENGINE_VLLM,
        returns_token_ids=True,
        health_path="/health",
        max_in_flight=64,
        requests_per_minute=600,
        tokens_per_minute=90_000,
    )
    first, second = found.routes
    assert (first.name, first.balancing, first.cached) == ("routes/gpt-4.1", route_pb2.BALANCING_PREFIX_CACHE, True)
    assert (first.deadline.seconds, first.hedge_delay.nanos, list(first.fallbacks)) == (
        60,
        250_000_000,
        ["routes/other"],
    )
    assert [(each.backend, each.backend_model, each.weight) for each in first.targets] == [
        ("backends/azure.eu", "deployment-1", 3),
        ("backends/azure.eu", "", 0),
    ]
    assert {each.mode: json.loads(each.request_fields_json) for each in first.overrides} == {
        "train": {"temperature": 1.0},
        "validation": {"temperature": 0, "top_p": None},
    }
    recording = first.recording
    assert (recording.sample_rate, list(recording.redact), recording.retention.seconds) == (0.5, ["email"], 7 * 86_400)
    assert [(each.name, each.expression) for each in recording.patterns] == [("customer", "C-[0-9]{6}")]
    assert [(each.weight, each.policy, each.policy_version) for each in second.targets] == [(1, "arithmetic", 4)]
    assert [*backend_problems(backend), *backend_problems(through_litellm)] == []
    assert [*route_problems(first), *route_problems(second)] == []


def test_a_policy_is_not_served_through_litellm(tmp_path: Path) -> None:
    text = """
    [[backend]]
    name = "gemini"
    base_url = "https://generativelanguage.googleapis.com"
    dialect = "litellm"
    provider = "gemini"
    returns_token_ids = true
    [[route]]
    model = "policy"
    targets = [{ backend = "gemini", policy = "arithmetic" }]
    """

    assert problems(text, tmp_path) == [
        "backend 1.returns_token_ids: is not possible for DIALECT_LITELLM: its answers have no token ids",
        "route 1.targets 1.policy: cannot be served there: the backend is called through LiteLLM, whose answers have no "
        "token ids to train on",
    ]


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    text = """
    retries = 3
    [[backend]]
    name = "a"
    base_url = "http://user:pass@host/v1"
    dialect = "open-ai"
    max_in_fligt = 3
    tokens_per_minute = 0
    [[backend]]
    name = "a"
    apis = ["chat", "messages"]
    [[route]]
    model = "UPPER"
    targets = [{ backend = "b" }, { backend = "a", weight = -1 }, { policy_version = 3 }]
    fallbacks = ["chat"]
    deadline_s = 0
    cached = "yes"
    [route.overrides]
    night = {}
    train = { model = "x" }
    validation = { since = 2026-01-01 }
    test = "{"
    [route.recording]
    redact = ["shoes"]
    patterns = { BAD = "(" }
    """

    assert problems(text, tmp_path) == [
        "retries: no such key; known: backend, route",
        "backend 1.max_in_fligt: no such key; did you mean 'max_in_flight'?",
        "backend 1.dialect: must be one of openai, anthropic, azure-openai, litellm; did you mean 'openai'?",
        "backend 1.tokens_per_minute: must be a whole number from 1 to 1000000000000",
        "backend 1.base_url: is not of the form http://host:port/v1, without credentials",
        "backend 2.base_url: is required: a text",
        "backend 2.apis: 'chat' is not one of chat-completions, completions, responses, embeddings, messages, count-tokens",
        "route 1.cached: must be true or false",
        "route 1.targets 2.weight: must be a whole number from 0 to 10000",
        "route 1.targets 3.backend: is required: a text",
        "route 1.targets 3.policy_version: needs a policy",
        "route 1.deadline_s: must be greater than 0 and at most 86400",
        "route 1.overrides.night: no such key; known: train, validation, test",
        "route 1.overrides.train: may not set model",
        "route 1.overrides.validation: must be a table of texts, numbers, booleans, lists and tables, or a text",
        "route 1.overrides.test: must be a JSON object",
        "route 1.recording.sample_rate: is required: a number",
        "route 1.recording.redact: 'shoes' is not one of email, phone, card_number, api_key, none",
        "route 1.model: 'routes/UPPER' is not of the form routes/{[a-z0-9._-]{1,100}}, not of dots alone",
        "route 1.recording.patterns[0].name: is not of the form [a-z0-9_]{1,32}",
        "route 1.recording.patterns[0].expression: is not a regular expression: missing ), unterminated subpattern at position 0",
        "backend: 'a' occurs 2 times",
        "route 1.targets 1.backend: there is no backend 'b'; known: a, a",
        "route 1.fallbacks: there is no route 'chat'; known: UPPER",
    ]


@pytest.mark.parametrize("key", ["key", "api_key", "token", "secret"])
def test_a_key_of_a_vendor_is_refused_and_not_repeated(tmp_path: Path, key: str) -> None:
    text = f'[[backend]]\nname = "a"\nbase_url = "http://h/v1"\n{key} = "sk-real"'

    (problem,) = problems(text, tmp_path)

    assert problem.startswith(f"backend 1.{key}: a vendor's key must not be in this file")
    assert "sk-real" not in problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it has no [[backend]] and no [[route]]"),
        ("backend = 3", "backend: must be a list of tables, [[backend]]"),
        ("[[backend]", "Expected ']]'"),
        ('[[route]]\nmodel = "a"', "route 1.targets: is required: a list of tables"),
        ('[[route]]\nmodel = "a"\ntargets = ["b"]', "route 1.targets: must be a list of tables"),
    ],
)
def test_a_file_without_a_set_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    assert any(each.startswith(problem) for each in problems(text, tmp_path))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_proxy_file(tmp_path / "none.toml")
