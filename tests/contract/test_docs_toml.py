"""Every TOML block of the documents is accepted by the reader that it is written for."""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fulmen.errors import SettingsInvalid
from fulmen.train_toml.reader import ConfigError, TableReader
from fulmen.train_toml.train import TrainConfig, load_train_config
from fulmen_algorithm.runs.creation.rules import parse_settings
from tests.support.algorithm.run_service import ALGORITHMS
from tests.support.distributions import ROOT

BLOCK = re.compile(r"^```toml\n(.*?)^```", re.M | re.S)
# The first comment of a block that is a part of another file.
OTHER_FILE = re.compile(r"# (?!train\.toml)[\w.-]+\.toml$", re.M)
MISSING_FILE = re.compile(r"(?:there is no file|the file) (\S+)")
TABLES = ("name", "policy", "agent", "data", "stage")
# What a block needs that shows a part of a file.
REST: Mapping[str, Any] = {
    "name": "docs",
    "agent": {"python": "agent.py:solve"},
    "data": {"train": "tasks.jsonl"},
    "stage": [{"algorithm": "evaluate"}],
}
PAGES = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def blocks() -> Iterator[tuple[str, str]]:
    """Yields the blocks of all pages, each with the place of its first line."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8") if (ROOT / page).exists() else ""
        for found in BLOCK.finditer(text):
            yield f"{page}:{text.count(chr(10), 0, found.start()) + 2}", found[1]


def of_train_toml() -> dict[str, dict[str, Any]]:
    """Returns the blocks of a `train.toml`, parsed, by place; bare settings are those of a stage."""
    found = {}
    for place, text in blocks():
        block = tomllib.loads(text)
        if OTHER_FILE.match(text):
            continue
        is_part_of_stage = not any(key in TABLES for key in block)
        found[place] = {"stage": [{"algorithm": "", **block}]} if is_part_of_stage else block
    return found


BLOCKS = of_train_toml()


def loaded(block: Mapping[str, Any], folder: Path) -> TrainConfig:
    """Returns a block as `fulmen train` reads it, in a folder that has the files that it names."""
    file = folder / "train.toml"
    agent = block.get("agent", REST["agent"])
    if not agent.keys() & {"python", "command", "container", "job"}:
        agent = {**REST["agent"], **agent}
    file.write_text(as_toml({**REST, **block, "agent": agent}), encoding="utf-8")
    for name in ("agent.py", "tasks.jsonl"):
        (folder / name).touch()
    try:
        return load_train_config(file)
    except ConfigError as error:
        for path in MISSING_FILE.findall(str(error)):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text("x", encoding="utf-8")
    return load_train_config(file)


def as_toml(value: Mapping[str, Any]) -> str:
    """Renders a document; inline tables and arrays of them may stand for all others."""
    return "".join(f"{key} = {_inline(each)}\n" for key, each in value.items())


def _inline(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_inline(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    return json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("place", BLOCKS)
def test_fulmen_train_reads_every_block_of_a_train_toml(place: str, tmp_path: Path) -> None:
    block = BLOCKS[place]
    for stage in block.get("stage", []):
        # A part of a stage is one of an algorithm that trains.
        stage["algorithm"] = stage["algorithm"] or "grpo"

    config = loaded(block, tmp_path)

    for stage in config.stages if "stage" in block else ():
        try:
            parse_settings(ALGORITHMS[stage.algorithm], json.dumps(stage.settings))
        except SettingsInvalid as error:
            pytest.fail(f"{place}: {[(each.field, each.description) for each in error.violations]}")


def test_documents_show_every_setting_of_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known: set[str] = set()
    check = TableReader.known

    def recorded(reader: TableReader, *keys: str) -> None:
        known.update(f"{reader._where}.{key}" for key in keys)
        check(reader, *keys)

    monkeypatch.setattr(TableReader, "known", recorded)
    shown: set[str] = set()
    for block in BLOCKS.values():
        if "agent" in block:
            loaded({"agent": block["agent"]}, tmp_path)
            shown.update(paths(block["agent"], "agent"))

    wanted = {each for each in known if each.startswith("agent.")}
    assert "agent.judge.samples" in wanted
    # One of several that exclude each other may be in the text.
    text = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
    assert [each for each in sorted(wanted - shown) if f"{each.rpartition('.')[2]} = " not in text] == []


def paths(table: Mapping[str, Any], above: str) -> Iterator[str]:
    """Yields the path of every key of a table, with dots."""
    for key, value in table.items():
        yield f"{above}.{key}"
        if isinstance(value, Mapping):
            yield from paths(value, f"{above}.{key}")
