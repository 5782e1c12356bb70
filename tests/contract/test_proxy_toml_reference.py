"""The reference of proxy.toml and its JSON Schema say what the reader takes, and pages show files that it takes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from fulmen.train_toml.reader import ConfigError
from fulmen_cli.proxy.file_format import TABLES, read_proxy_file
from tests.contract.test_docs_toml import blocks
from tests.unit.cli.test_proxy_file import WHOLE

FILES = {place: text for place, text in blocks() if text.startswith("# proxy.toml\n")}


@pytest.fixture(scope="module")
def schema(repository_root: Path) -> Draft202012Validator:
    document = json.loads((repository_root / "docs/proxy.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(document)
    return Draft202012Validator(document)


@pytest.mark.parametrize("text", [WHOLE, *FILES.values()], ids=["whole", *FILES])
def test_reader_and_schema_take_every_file_that_is_shown(
    schema: Draft202012Validator, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text(text, encoding="utf-8")

    read_proxy_file(file)

    assert [error.message for error in schema.iter_errors(tomllib.loads(text))] == []


def test_a_page_shows_a_file() -> None:
    assert any(place.startswith("docs/proxy-toml.md") for place in FILES)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (('key_name = "azure"', "key_nam = 1"), ["backend", 0]),
        (("weight = 3", "weight = -3"), ["route", 0, "targets", 0, "weight"]),
        (('dialect = "azure-openai"', 'dialect = "azure"'), ["backend", 0, "dialect"]),
        (('redact = ["email"]', 'redact = ["shoes"]'), ["route", 0, "recording", "redact", 0]),
        (("sample_rate = 0.5", ""), ["route", 0, "recording"]),
    ],
)
def test_what_the_schema_refuses_the_reader_refuses_too(
    schema: Draft202012Validator, change: tuple[str, str], place: list[Any], tmp_path: Path
) -> None:
    text = WHOLE.replace(*change)
    file = tmp_path / "proxy.toml"
    file.write_text(text, encoding="utf-8")

    assert place in [list(error.absolute_path) for error in schema.iter_errors(tomllib.loads(text))]
    with pytest.raises(ConfigError):
        read_proxy_file(file)


def test_the_whole_file_has_every_key() -> None:
    document = tomllib.loads(WHOLE)
    route: dict[str, Any] = {key: value for each in reversed(document["route"]) for key, value in each.items()}
    targets = {key for each in document["route"] for target in each["targets"] for key in target}
    backend = {key for each in document["backend"] for key in each}
    shown = {"": set(document), "backend": backend, "route": set(route), "route.targets": targets}
    shown |= {"route.overrides": {*route["overrides"], "test"}, "route.recording": set(route["recording"])}

    assert shown == {table: set(keys) for table, keys in TABLES.items()}
