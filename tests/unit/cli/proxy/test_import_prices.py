"""`fulmen proxy import-prices` makes a price file that the proxy reads of the file that LiteLLM publishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from fulmen_cli.exits import Exit
from fulmen_cli.main import app
from fulmen_llm_proxy.settings import LlmProxySettings
from tests.support.cli.command_runner import CliRunner

# Of the shape of LiteLLM's model_prices_and_context_window.json.
PUBLISHED: dict[str, Any] = {
    "sample_spec": {"input_cost_per_token": 0.0, "litellm_provider": "one of https://docs.litellm.ai/docs/providers"},
    "gpt-4o": {
        "max_tokens": 16384,
        "input_cost_per_token": 2.5e-06,
        "output_cost_per_token": 1e-05,
        "cache_read_input_token_cost": 1.25e-06,
        "litellm_provider": "openai",
        "mode": "chat",
    },
    "claude-sonnet-4-5": {
        "input_cost_per_token": 3e-06,
        "output_cost_per_token": 1.5e-05,
        "cache_read_input_token_cost": 3e-07,
        "cache_creation_input_token_cost": 3.75e-06,
        "input_cost_per_token_above_200k_tokens": 6e-06,
        "litellm_provider": "anthropic",
        "mode": "chat",
    },
    "azure/gpt-4o": {"input_cost_per_token": 2.75e-06, "output_cost_per_token": 1.1e-05, "litellm_provider": "azure"},
    "text-embedding-3-small": {"input_cost_per_token": 2e-08, "litellm_provider": "openai", "mode": "embedding"},
    "dall-e-3": {"input_cost_per_pixel": 4e-08, "litellm_provider": "openai", "mode": "image_generation"},
    "odd": {"input_cost_per_token": "free", "litellm_provider": "openai"},
    "together-ai-*": {"input_cost_per_token": 1e-07, "output_cost_per_token": 1e-07, "litellm_provider": "together_ai"},
}


def run(folder: Path, *options: str, published: object = PUBLISHED) -> tuple[Result, Path]:
    source, made = folder / "litellm.json", folder / "prices.json"
    source.write_text(published if isinstance(published, str) else json.dumps(published))
    return CliRunner().invoke(app, ["proxy", "import-prices", str(source), "--to", str(made), *options]), made


def test_every_price_by_the_token_reaches_the_proxy(tmp_path: Path) -> None:
    result, made = run(tmp_path)

    assert result.exit_code == Exit.OK, result.output
    assert "4 prices in" in result.stdout
    assert "3 models without a price per token" in result.stdout
    assert "of these, 1 cost more for long prompts" in result.stderr
    prices = LlmProxySettings(dev_mode=True, price_file=str(made)).resolved_prices()
    assert {name: (each.input, each.cached_input, each.cache_write, each.output) for name, each in prices.items()} == {
        "gpt-4o": (2.5, 1.25, 2.5, 10),
        "claude-sonnet-4-5": (3, 0.3, 3.75, 15),
        "azure/gpt-4o": (2.75, 2.75, 2.75, 11),
        "text-embedding-3-small": (0.02, 0.02, 0.02, 0),
    }


def test_only_the_providers_that_are_named_are_taken(tmp_path: Path) -> None:
    result, made = run(tmp_path, "--provider", "anthropic", "--provider", "azure")

    assert result.exit_code == Exit.OK, result.output
    assert set(json.loads(made.read_text())) == {"claude-sonnet-4-5", "azure/gpt-4o"}


@pytest.mark.parametrize(
    ("published", "options", "problem"),
    [
        ("[", [], "is not JSON"),
        ([1], [], "is not a JSON object with an object for each model"),
        ({"a": 1}, [], "is not a JSON object with an object for each model"),
        ({"a": {"mode": "chat"}}, [], "has no prices per token"),
        (PUBLISHED, ["--provider", "opneai"], "has no models of opneai. It has models of anthropic, azure, openai"),
    ],
)
def test_a_file_of_another_shape_makes_no_prices(
    tmp_path: Path, published: object, options: list[str], problem: str
) -> None:
    result, made = run(tmp_path, *options, published=published)

    assert result.exit_code == Exit.USAGE
    assert problem in result.stderr
    assert not made.exists()
