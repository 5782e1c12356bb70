"""Training files of experiments: an example's, with other stages, other first weights or another agent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fulmen.train_toml.train import StageConfig, load_train_config

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def stages_of(example: str) -> tuple[StageConfig, ...]:
    """Reads the stages of an example."""
    return load_train_config(EXAMPLES / example / "train.toml").stages


def write(
    folder: Path, example: str, stages: Sequence[StageConfig], *, weights: str = "", agent: Path | None = None
) -> Path:
    """Copies an example and writes a training file of its own; returns the file.

    Args:
        folder: Created; an existing one is replaced.
        example: Name of the example.
        stages: In the place of its stages.
        weights: Folder of the first weights; empty: the example builds them.
        agent: A file with `solve`, in the place of its agent; it may import the example's as `agent`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(EXAMPLES / example, folder, ignore=shutil.ignore_patterns("__pycache__"))
    if agent is not None:
        shutil.copy(agent, folder)
    source = {"path": weights} if weights else {"build": "make_model.py:build"}
    tables: dict[str, Mapping[str, Any]] = {
        "policy": {"name": example, **source},
        "agent": {"python": f"{agent.name if agent else 'agent.py'}:solve", "grader": "grader.py:grade"},
        "data": {name: f"tasks/{name}.jsonl" for name in ("train", "validation", "demonstrations")},
    }
    lines = [f'name = "{example}"']
    for name, table in tables.items():
        lines += [f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in table.items())]
    for stage in stages:
        lines += ["[[stage]]", f'algorithm = "{stage.algorithm}"']
        lines += [f"{key} = {_toml(value)}" for key, value in stage.settings.items()]
    file = folder / "train.toml"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def _toml(value: object) -> str:
    """Renders a value; TOML writes scalars and lists of them as JSON does."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)
