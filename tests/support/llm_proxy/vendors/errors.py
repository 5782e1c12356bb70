"""Reads errors of the proxy with the vendors' own packages, as their clients would."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import anthropic
import httpx2
import openai

from fulmen_llm_proxy.apis.api import Dialect

_REQUEST = httpx2.Request("POST", "http://proxy/")
_OPENAI = openai.OpenAI(api_key="none")
_ANTHROPIC = anthropic.Anthropic(api_key="none")


def error_of(
    dialect: Dialect, status: int, headers: Mapping[str, str], body: bytes
) -> openai.APIStatusError | anthropic.APIStatusError:
    """Returns the error that the vendor's client raises for an answer, after checking that it found all it looks for."""
    client: Any = _ANTHROPIC if dialect is Dialect.ANTHROPIC else _OPENAI
    answer = httpx2.Response(status, headers=dict(headers), content=body, request=_REQUEST)
    assert answer.headers["content-type"].startswith("application/json"), body[:200]
    error = client._make_status_error_from_response(answer)
    document = json.loads(body)
    if dialect is Dialect.ANTHROPIC:
        assert document["type"] == "error"
    else:
        assert isinstance(error.code, str)
        assert isinstance(error.type, str)
    inner = document["error"]
    assert isinstance(inner["type"], str)
    assert isinstance(inner["message"], str)
    assert len(inner["message"]) < 2000
    return error
