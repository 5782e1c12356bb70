"""The models that are served, in the shapes of both vendors."""

from __future__ import annotations

import anthropic
import pytest
from anthropic.types import ModelInfo

from tests.support.llm_proxy.harness import MODEL, RunningProxy, target


async def test_anthropics_client_lists_models_and_finds_one(proxy: RunningProxy) -> None:
    await proxy.put_route(target("one"), model="judge")
    _, key = proxy.attempt()
    async with anthropic.AsyncAnthropic(base_url=proxy.url.removesuffix("/v1"), api_key=key, max_retries=0) as agent:
        models = [model async for model in agent.models.list()]
        found = await agent.models.retrieve("judge")
        with pytest.raises(anthropic.NotFoundError, match="Served models: judge, tiny"):
            await agent.models.retrieve("gone")
    assert [model.id for model in models] == ["judge", MODEL]
    ModelInfo.model_validate(found.model_dump(mode="json"))
    assert (found.id, found.display_name, found.type) == ("judge", "judge", "model")


async def test_models_are_for_those_with_a_key(proxy: RunningProxy) -> None:
    for path in ("models", f"models/{MODEL}"):
        async with proxy.http.get(f"{proxy.url}/{path}", headers={"anthropic-version": "2023-06-01"}) as answer:
            assert answer.status == 401
            assert (await answer.json())["type"] == "error"
