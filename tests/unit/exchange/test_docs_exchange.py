"""What docs/exchange.md and docs/metrics.md say of settings, refusals and metrics is true."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from fulmen_algorithm.runs.algorithm import AlgorithmSettings
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_exchange.exchanger import SAMPLED
from fulmen_exchange.links.settings import GrpcLinkSettings
from fulmen_exchange.metrics import RoundCosts
from fulmen_exchange.registry import load_codecs
from fulmen_exchange.server.prometheus import ExchangeMetrics
from fulmen_exchange.settings import CodecSettings

DDP: dict[str, Any] = {"parallel": {"kind": "ddp", "ranks": 2}}
LORA: dict[str, Any] = {"lora": {"rank": 4}}


@pytest.fixture(scope="module")
def page(repository_root: Path) -> str:
    return (repository_root / "docs/exchange.md").read_text(encoding="utf-8")


def rows_after(page: str, head: str) -> list[list[str]]:
    """Returns the cells of the table whose head begins so."""
    lines = page[page.index(head) :].splitlines()[2:]
    table = lines[: next(index for index, line in enumerate([*lines, ""]) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([a-z_]+)`", cell)


def test_every_example_of_settings_is_one(page: str) -> None:
    blocks = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    examples = [block for block in blocks if "exchange" in block]
    assert len(examples) >= 3
    for example in examples:
        sgd = {"optimizer": {"kind": "sgd"}} if example["exchange"]["codec"] == "dgc" else {}
        assert AlgorithmSettings(**{**DDP, **sgd, **example}).exchange is not None


def test_settings_have_the_names_and_defaults_that_are_said(page: str) -> None:
    own = {name for entry in load_codecs().values() for name in entry.settings.model_fields}
    told = rows_after(page, "| `exchange.` | | default |")
    assert {name for row in told for name in names_in(row[0])} <= own
    assert set(CodecSettings.model_fields) <= {name for row in told for name in names_in(row[0])}
    for [name], default in ((names_in(row[0]), row[2]) for row in told[2:]):
        value = CodecSettings.model_fields[name].default
        shown = str(getattr(value, "kind", value)) if value != () else "none"
        assert default.strip("`") == shown, name


def test_settings_of_the_link_have_the_names_and_defaults_that_are_said(page: str) -> None:
    told = rows_after(page, "| `link.` | | default |")
    fields = {name: field.default for name, field in GrpcLinkSettings.model_fields.items()}
    shown = {
        name: float(default) for row in told for name, default in zip(names_in(row[0]), row[2].split(","), strict=True)
    }
    assert shown == {name: fields[name] for name in fields if name not in ("kind", "targets", "spares")}


def test_settings_of_the_service_have_the_names_and_defaults_that_are_said(page: str) -> None:
    prefix = "exchange_"
    told = rows_after(page, "| `FULMEN_ALGORITHM_EXCHANGE_` | | default |")
    fields = AlgorithmServiceSettings.model_fields
    assert {row[0].strip("`"): row[2] for row in told} == {
        name.removeprefix(prefix).upper(): str(fields[name].default)
        for name in fields
        if name.startswith(prefix) and name not in ("exchange_targets", "exchange_folder")
    }


GRPC = {"kind": "grpc", "targets": ["127.0.0.1:7301"]}
REFUSED: dict[str, dict[str, Any]] = {
    "exchange: needs parallel.kind ddp, or fsdp2 ...": {"exchange": {"codec": "qsgd"}},
    "exchange.link: must be kind torch with fsdp2": {
        "parallel": {"kind": "fsdp2", "ranks": 4, "shard": 2}, "exchange": {"codec": "qsgd", "link": GRPC}
    },
    "exchange.link: must be kind torch with parallel.min_ranks": {
        "parallel": {"kind": "ddp", "min_ranks": 1}, "exchange": {"codec": "qsgd", "link": GRPC}
    },
    "optimizer: topk needs kind sgd ...": {**DDP, "exchange": {"codec": "topk"}},
    "optimizer.momentum: must be 0, dgc has the momentum": {
        **DDP, "exchange": {"codec": "dgc"}, "optimizer": {"kind": "sgd", "momentum": 0.9}
    },
    "exchange: dgc keeps a residual of each step, which does not work with lora": {
        **DDP, **LORA, "exchange": {"codec": "dgc"}, "optimizer": {"kind": "sgd"}
    },
    "policy: 'stages' needs a codec with a ratio": {
        **DDP, "exchange": {"codec": "qsgd", "policy": {"kind": "stages"}}
    },
    "outer: this codec applies the optimiser's momentum": {
        **DDP, "exchange": {"codec": "dgc", "outer": {"kind": "outer"}}, "optimizer": {"kind": "sgd"}
    },
}  # fmt: skip


@pytest.mark.parametrize("text", sorted(REFUSED))
def test_what_is_refused_is_refused_in_these_words(page: str, text: str) -> None:
    assert text in [row[0].strip("`") for row in rows_after(page, "| error | reason |")]
    with pytest.raises(ValidationError, match=re.escape(text.removesuffix(" ..."))):
        AlgorithmSettings(**REFUSED[text])


def test_what_goes_wrong_while_a_run_goes_on_is_told_in_these_words(page: str, repository_root: Path) -> None:
    folders = ("libs/gradient_exchange/src", "services/algorithm/src")
    sources = [path for folder in folders for path in (repository_root / folder).rglob("*.py")]
    said = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    for [text, _] in rows_after(page, "| error | remedy |"):
        fixed = re.split(r"HOST:PORT| N$|; see id", text.strip("`"))[0]
        assert len(fixed) > 10
        assert fixed in said, text


def test_which_optimiser_goes_with_which_codec_is_as_said(page: str) -> None:
    for row in rows_after(page, "| optimiser, line | codec |"):
        outer = {"outer": {"kind": "outer"}} if "outer" in row[1] else {}
        for codec in set(names_in(row[1])) & load_codecs().keys():
            for optimizer in ("adamw", "sgd"):
                if (optimizer in row[0].lower() or "any" in row[0]) and not ("but `dgc`" in row[1] and codec == "dgc"):
                    settings = {**DDP, "optimizer": {"kind": optimizer}, "exchange": {"codec": codec, **outer}}
                    assert AlgorithmSettings(**settings).exchange is not None, (codec, optimizer)


def test_every_figure_of_the_stream_is_explained_and_no_other(page: str) -> None:
    told = {name for row in rows_after(page, "| `exchange_` | |") for name in names_in(row[0])}
    assert told == {name.removeprefix("exchange_") for name in RoundCosts().metrics()} | set(SAMPLED)


def test_every_metric_of_shards_is_explained_and_no_other(repository_root: Path) -> None:
    registry = CollectorRegistry()
    registry.register(ExchangeMetrics(lambda: ()))
    exported = {f"{family.name}_total" if family.type == "counter" else family.name for family in registry.collect()}
    text = (repository_root / "docs/metrics.md").read_text(encoding="utf-8")
    told = rows_after(text, "| `fulmen_algorithm_exchange_` |")
    assert {f"fulmen_algorithm_exchange_{name}" for row in told for name in names_in(row[0])} == exported
