"""The served APIs, by path and by name."""

from __future__ import annotations

from collections.abc import Mapping

from fulmen_llm_proxy.apis.api import Api, ApiName
from fulmen_llm_proxy.apis.chat import ChatApi
from fulmen_llm_proxy.apis.completions import CompletionsApi
from fulmen_llm_proxy.apis.messages import MessagesApi
from fulmen_llm_proxy.apis.passthrough import CountTokensApi, EmbeddingsApi
from fulmen_llm_proxy.apis.responses import ResponsesApi

_ALL: tuple[Api, ...] = (ChatApi(), CompletionsApi(), ResponsesApi(), EmbeddingsApi(), MessagesApi(), CountTokensApi())

APIS: Mapping[ApiName, Api] = {api.name: api for api in _ALL}
BY_PATH: Mapping[str, Api] = {f"/v1{api.path}": api for api in _ALL}
"""APIs by the path that agents call."""
CAPTURED = frozenset(api.name for api in _ALL if api.can_capture)
"""APIs whose answers can carry token ids."""
