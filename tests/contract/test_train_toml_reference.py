"""The reference of train.toml and its JSON Schema say what the reader and the algorithms take."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from fulmen.train_toml import train as whole_file
from fulmen.train_toml.reader import TableReader
from tools.train_toml_reference import PAGE, TABLES

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*/*.toml"))


@pytest.fixture(scope="module")
def schema(repository_root: Path) -> Draft202012Validator:
    document = json.loads((repository_root / "docs/train.schema.json").read_text(encoding="utf-8"))
    Draft202012Validator.check_schema(document)
    return Draft202012Validator(document)


def test_every_key_that_the_reader_knows_is_described_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[str, set[str]] = {}
    own = TableReader.known

    def noted(self: TableReader, *keys: str) -> None:
        known.setdefault(self._where, set()).update(keys)
        own(self, *keys)

    monkeypatch.setattr(TableReader, "known", noted)
    tables: dict[str, Any] = {"agent": {"container": {}, "judge": {}, "python": "a.b:c"}, "data": {}, "policy": {}}
    whole_file._config(Path("train.toml"), TableReader(tables, "", []), [])

    described = {table: set(keys) for table, keys in TABLES.items()}
    described[""] |= {table for table in TABLES if table and "." not in table} | {"stage"}
    assert known == described


def test_every_setting_has_a_description() -> None:
    assert [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.endswith("|  |")] == []


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_the_schema_takes_every_example(schema: Draft202012Validator, file: Path) -> None:
    assert [error.message for error in schema.iter_errors(tomllib.loads(file.read_text(encoding="utf-8")))] == []


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[[stage]]\nalgorithm = "grpo"\ngroup_sise = 8', ["stage", 0]),
        ('[[stage]]\nalgorithm = "grpo"\nsteps = "many"', ["stage", 0, "steps"]),
        ('[[stage]]\nalgorithm = "gropo"', ["stage", 0, "algorithm"]),
        ('[agent.limits]\nmemori = "1GiB"\n[[stage]]\nalgorithm = "sft"', ["agent", "limits"]),
    ],
)
def test_the_schema_finds_a_typo_where_it_stands(schema: Draft202012Validator, text: str, place: list[Any]) -> None:
    document = tomllib.loads(text)
    document = {"name": "x", "data": {}, **document, "agent": {"python": "a.py:b", **document.get("agent", {})}}

    assert place in [list(error.absolute_path) for error in schema.iter_errors(document)]


def test_words_for_what_toml_cannot_say_are_taken(schema: Draft202012Validator) -> None:
    stage = {"algorithm": "grpo", "learning_rate": "auto", "explosion_factor": "none", "aggregation": "auto"}

    assert schema.is_valid({"name": "x", "agent": {"python": "a.py:b"}, "data": {}, "stage": [stage]})
