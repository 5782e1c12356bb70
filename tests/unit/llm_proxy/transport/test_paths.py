"""Paths that name an attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import AttemptNotFound
from fulmen.ids import AttemptName, uuid7
from fulmen_llm_proxy.apis.registry import BY_PATH
from fulmen_llm_proxy.transport.http.paths import attempt_in, without_attempt


@pytest.mark.parametrize("path", [*BY_PATH, "/v1/models", "/v1/models/x", "/openai/deployments/x/chat/completions"])
def test_the_path_of_an_api_is_the_same_behind_an_attempt(path: str) -> None:
    name = AttemptName(rollout_id=uuid7(), number=3)
    assert without_attempt(f"/{name}{path}") == path
    assert attempt_in(f"/{name}{path}") == name
    assert without_attempt(path) == path
    assert attempt_in(path) is None


@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/rollouts/x/v1/models", "/rollouts/a/attempts/1", "/"])
def test_only_apis_stand_behind_an_attempt(path: str) -> None:
    name = AttemptName(rollout_id=uuid7(), number=3)
    behind = f"/{name}{path}"
    assert without_attempt(behind) == behind
    assert without_attempt(path) == path


@given(text=st.text(max_size=80))
def test_whatever_stands_there_it_is_an_attempt_or_not_found(text: str) -> None:
    try:
        attempt = attempt_in(f"/rollouts/{text}")
    except AttemptNotFound:
        return
    assert isinstance(attempt, AttemptName)
