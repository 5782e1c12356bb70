"""Request paths: OpenAI's and Azure's forms, with and without an attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import AttemptNotFound
from fulmen.ids import DEFAULT_PROJECT, AttemptName, uuid7
from fulmen_llm_proxy.apis.registry import BY_PATH
from fulmen_llm_proxy.transport.http.paths import RequestPath, parse_path


@pytest.mark.parametrize(
    "path",
    [
        *BY_PATH,
        "/v1/models",
        "/v1/models/x",
        "/openai/deployments/x/chat/completions",
        "/chat/completions",
        "/models/x",
    ],
)
def test_the_path_of_an_api_is_the_same_behind_an_attempt(path: str) -> None:
    name = AttemptName(project=DEFAULT_PROJECT, rollout_id=uuid7(), number=3)
    plain, behind = parse_path(path), parse_path(f"/{name}{path}")
    assert (behind.api, behind.deployment) == (plain.api, plain.deployment)
    assert behind.attempt() == name
    assert plain.attempt() is None


@pytest.mark.parametrize(
    "path", ["/healthz", "/metrics", "/projects/p/rollouts/x/v1/models", "/projects/p/rollouts/a/attempts/1", "/"]
)
def test_only_apis_stand_behind_an_attempt(path: str) -> None:
    name = AttemptName(project=DEFAULT_PROJECT, rollout_id=uuid7(), number=3)
    behind = f"/{name}{path}"
    assert parse_path(behind).api == behind
    assert parse_path(path).api == path


@pytest.mark.parametrize(
    ("path", "api", "deployment"),
    [
        ("/openai/deployments/m/chat/completions", "/v1/chat/completions", "m"),
        ("/openai/deployments/m", "/v1/", "m"),
        ("/openai/v1/responses", "/v1/responses", ""),
        ("/openai/responses", "/v1/responses", ""),
        ("/v1/chat/completions", "/v1/chat/completions", ""),
        ("/chat/completions", "/v1/chat/completions", ""),
        ("/messages/count_tokens", "/v1/messages/count_tokens", ""),
        ("/models", "/v1/models", ""),
        ("/models/m", "/v1/models/m", ""),
        ("/responses/r/cancel", "/v1/responses/r/cancel", ""),
        ("/chat", "/chat", ""),
        ("/modelsx", "/modelsx", ""),
    ],
)
def test_azure_paths_name_the_same_apis(path: str, api: str, deployment: str) -> None:
    assert parse_path(path) == RequestPath(api, deployment)


@given(text=st.text(max_size=80))
def test_whatever_stands_there_it_is_an_attempt_or_not_found(text: str) -> None:
    try:
        attempt = parse_path(f"/projects/{text}").attempt()
    except AttemptNotFound:
        return
    assert isinstance(attempt, AttemptName)
