"""`fulmen proxy import-prices`: prices of models for the proxy, of the file that LiteLLM publishes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import console

__all__ = ["import_prices"]

MAX_BYTES: Final = 64 * 1024 * 1024
MAX_PRICE: Final = 1e6
"""The proxy's maximum, dollars per million tokens."""
PER_MILLION: Final = 1e6
_FIELDS: Final = {
    "input": "input_cost_per_token",
    "output": "output_cost_per_token",
    "cached_input": "cache_read_input_token_cost",
    "cache_write": "cache_creation_input_token_cost",
}
_NOT_A_MODEL: Final = "sample_spec"
_WILDCARDS: Final = frozenset("*?[")


def import_prices(
    file: Annotated[Path, typer.Argument(help="model_prices_and_context_window.json of LiteLLM.")],
    to: Annotated[Path, typer.Option("--to", help="File for the proxy's setting PRICE_FILE.")],
    provider: Annotated[
        list[str] | None,
        typer.Option("--provider", help="Only models of this provider, such as openai. May be repeated."),
    ] = None,
) -> None:
    """Makes a price file for the proxy from the prices that LiteLLM publishes.

    A model without a price per token is left out. If a price rises with the length of the prompt, the price of short prompts is
    used.

    Example:

        fulmen proxy import-prices model_prices_and_context_window.json --provider openai --to prices.json
    """
    models = _models(file)
    wanted = set(provider or ())
    known = {str(each.get("litellm_provider")) for each in models.values()}
    if unknown := sorted(wanted - known):
        raise CommandFailed(
            f"{file} has no models of {', '.join(unknown)}. It has models of {', '.join(sorted(known))}.",
            exit_code=Exit.USAGE,
        )
    chosen = {name: each for name, each in models.items() if not wanted or each.get("litellm_provider") in wanted}
    prices = dict(_prices(chosen))
    if not prices:
        raise CommandFailed(f"{file} has no prices per token.", exit_code=Exit.USAGE)
    try:
        to.write_text(json.dumps(prices, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    except OSError as error:
        raise CommandFailed(f"{to} cannot be written: {error.strerror}.") from None
    tiered = sum(any("_above_" in key for key in chosen[name]) for name in prices)
    left = len(chosen) - len(prices)
    console().print(
        f"{len(prices)} prices in {to}; {left} models without a price per token.", markup=False, soft_wrap=True
    )
    if tiered:
        sys.stderr.write(
            f"warning: of these, {tiered} cost more for long prompts, which the proxy does not take into account.\n"
        )


def _models(file: Path) -> dict[str, dict[str, Any]]:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise CommandFailed(f"{file} has more than {MAX_BYTES} bytes.", exit_code=Exit.USAGE)
        document = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandFailed(f"{file} cannot be read: {error.strerror}.", exit_code=Exit.USAGE) from None
    except (ValueError, RecursionError) as error:
        raise CommandFailed(f"{file} is not JSON: {error}.", exit_code=Exit.USAGE) from None
    if not isinstance(document, dict) or not all(isinstance(each, dict) for each in document.values()):
        raise CommandFailed(f"{file} is not a JSON object with an object for each model.", exit_code=Exit.USAGE)
    return {name: each for name, each in document.items() if name != _NOT_A_MODEL}


def _prices(models: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, float]]]:
    for name, model in models.items():
        price = {ours: _dollars(model[theirs]) for ours, theirs in _FIELDS.items() if model.get(theirs) is not None}
        if "input" not in price or _WILDCARDS & set(name) or not all(0 <= each <= MAX_PRICE for each in price.values()):
            continue
        # An embedding has no output.
        yield name, {"output": 0.0, **price}


def _dollars(per_token: Any) -> float:
    """Returns dollars per million tokens; NaN if it is not a number."""
    if isinstance(per_token, bool) or not isinstance(per_token, int | float):
        return math.nan
    return round(per_token * PER_MILLION, 9)
