"""The format of `train.toml`: what to train, with which agent, on which data, in which stages.

Reading is strict: a key that is not in the format is an error with the nearest known key, and all problems of a file
are reported at once. Settings of a stage belong to its algorithm and are checked by the algorithm service.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

__all__ = [
    "AgentConfig",
    "ConfigError",
    "DataConfig",
    "PolicyConfig",
    "StageConfig",
    "TrainConfig",
    "load_train_config",
    "with_overrides",
]

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_RUN_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")
_TARGET: Final = re.compile(r"[^:]+:[A-Za-z_][A-Za-z0-9_.]*")


class ConfigError(Exception):
    """Raised when a configuration or data file is wrong; `problems` holds every problem, one line each."""

    def __init__(self, summary: str, problems: Iterable[str]) -> None:
        """Keeps the summary and every problem."""
        self.summary = summary
        self.problems = tuple(problems)
        super().__init__("\n".join([summary, *(f"  {problem}" for problem in self.problems)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """What is trained and where its first weights come from; at most one of the three sources is set."""

    name: str
    build: str = ""
    path: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How the agent is started and scored: each as a Python callable or as a command."""

    python: str = ""
    command: tuple[str, ...] = ()
    grader: str = ""
    grader_command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The JSONL files, as absolute paths."""

    train: Path | None = None
    validation: Path | None = None
    demonstrations: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One training run: an algorithm and its settings."""

    algorithm: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A whole `train.toml`; `folder` is the one that holds it, and becomes the agent's bundle."""

    file: Path
    name: str
    policy: PolicyConfig
    agent: AgentConfig
    data: DataConfig
    stages: tuple[StageConfig, ...]

    @property
    def folder(self) -> Path:
        """The folder of the file, to which all its paths are relative."""
        return self.file.parent


def load_train_config(path: Path) -> TrainConfig:
    """Reads and checks a `train.toml`.

    Raises:
        ConfigError: with every problem at once.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"There is no file {path}.", ()) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder: name the file in it, such as {path / 'train.toml'}.", ()) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8.", [str(error)]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML.", [str(error)]) from None
    problems: list[str] = []
    config = _Reader(problems).config(path.resolve(), data)
    if problems:
        raise ConfigError(f"{path} is not valid.", problems)
    return config


def with_overrides(config: TrainConfig, assignments: Iterable[str], *, seed: int | None = None) -> TrainConfig:
    """Replaces settings of stages.

    Args:
        config: what was read.
        assignments: each `algorithm.setting=value`, the value as in TOML; a bare word is a string.
        seed: if given, the setting `seed` of every stage.

    Raises:
        ConfigError: if an assignment is malformed or names an algorithm that no stage has.
    """
    problems: list[str] = []
    stages = [dict(stage.settings) for stage in config.stages]
    for assignment in assignments:
        target, separator, text = assignment.partition("=")
        algorithm, dot, setting = target.strip().partition(".")
        if not (separator and dot and setting):
            problems.append(f"--set {assignment}: write it as ALGORITHM.SETTING=VALUE, such as grpo.steps=5")
            continue
        chosen = [index for index, stage in enumerate(config.stages) if stage.algorithm == algorithm]
        if not chosen:
            known = [stage.algorithm for stage in config.stages]
            problems.append(f"--set {assignment}: no stage has the algorithm {algorithm!r}{_hint(algorithm, known)}")
        for index in chosen:
            stages[index][setting] = _value(text.strip())
    if problems:
        raise ConfigError("The overrides are not valid.", problems)
    if seed is not None:
        for settings in stages:
            settings["seed"] = seed
    merged = tuple(replace(old, settings=new) for old, new in zip(config.stages, stages, strict=True))
    return replace(config, stages=merged)


class _Reader:
    """Takes the parsed TOML apart and collects every problem on the way."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems

    def config(self, file: Path, data: dict[str, Any]) -> TrainConfig:
        self._known(data, "", ("name", "policy", "agent", "data", "stage"))
        name = self._text(data, "", "name", required=True)
        if name and not _RUN_NAME.fullmatch(name):
            self._problems.append("name: at most 32 characters of a-z, 0-9 and -, beginning with a letter or digit")
        folder = file.parent
        policy = self._policy(self._table(data, "policy", required=True), folder)
        agent = self._agent(self._table(data, "agent", required=True), folder)
        tables = self._data(self._table(data, "data", required=True), folder)
        return TrainConfig(
            file=file, name=name, policy=policy, agent=agent, data=tables, stages=self._stages(data.get("stage"))
        )

    def _policy(self, table: dict[str, Any], folder: Path) -> PolicyConfig:
        self._known(table, "policy", ("name", "build", "path", "version"))
        policy = PolicyConfig(
            name=self._text(table, "policy", "name", required=True),
            build=self._text(table, "policy", "build"),
            path=self._text(table, "policy", "path"),
            version=self._text(table, "policy", "version"),
        )
        if policy.name and not _NAME.fullmatch(policy.name):
            self._problems.append("policy.name: 1 to 63 characters of a-z, 0-9, '.', '_' and '-'")
        if sum(map(bool, (policy.build, policy.path, policy.version))) > 1:
            self._problems.append("policy: give one of build, path and version, not several")
        if policy.build:
            self._target(policy.build, "policy.build", folder)
        if policy.path:
            policy = replace(policy, path=str((folder / policy.path).resolve()))
            if not Path(policy.path).is_dir():
                self._problems.append(f"policy.path: there is no folder {policy.path}")
        return policy

    def _agent(self, table: dict[str, Any], folder: Path) -> AgentConfig:
        self._known(table, "agent", ("python", "command", "grader", "grader_command", "environment"))
        agent = AgentConfig(
            python=self._text(table, "agent", "python"),
            command=self._words(table, "agent", "command"),
            grader=self._text(table, "agent", "grader"),
            grader_command=self._words(table, "agent", "grader_command"),
            environment=self._environment(table),
        )
        if bool(agent.python) == bool(agent.command):
            self._problems.append('agent: give python = "file.py:name" or command = ["program", ...], one of them')
        if agent.grader and agent.grader_command:
            self._problems.append("agent: give grader or grader_command, not both")
        for key, target in (("agent.python", agent.python), ("agent.grader", agent.grader)):
            if target:
                self._target(target, key, folder)
        return agent

    def _data(self, table: dict[str, Any], folder: Path) -> DataConfig:
        uses = ("train", "validation", "demonstrations")
        self._known(table, "data", uses)
        paths: dict[str, Path | None] = {}
        for use in uses:
            text = self._text(table, "data", use)
            paths[use] = (folder / text).resolve() if text else None
            path = paths[use]
            if path is not None and not path.is_file():
                self._problems.append(f"data.{use}: there is no file {path}")
        return DataConfig(**paths)

    def _stages(self, tables: Any) -> tuple[StageConfig, ...]:
        if not isinstance(tables, list) or not tables:
            self._problems.append("stage: at least one [[stage]] is needed")
            return ()
        stages = []
        for number, table in enumerate(tables, start=1):
            where = f"stage {number}"
            if not isinstance(table, dict):
                self._problems.append(f"{where}: write it as [[stage]]")
                continue
            settings = {key: value for key, value in table.items() if key != "algorithm"}
            self._json_values(settings, where)
            stages.append(
                StageConfig(algorithm=self._text(table, where, "algorithm", required=True), settings=settings)
            )
        return tuple(stages)

    def _target(self, target: str, where: str, folder: Path) -> None:
        if not _TARGET.fullmatch(target):
            self._problems.append(f'{where}: write it as "file.py:name" or "package.module:name", not {target!r}')
            return
        module = target.partition(":")[0]
        if module.endswith(".py") and not (folder / module).is_file():
            self._problems.append(f"{where}: there is no file {folder / module}")

    def _known(self, table: Mapping[str, Any], where: str, keys: tuple[str, ...]) -> None:
        for key in table:
            if key not in keys:
                full = f"{where}.{key}" if where else key
                self._problems.append(f"{full}: no such key{_hint(key, keys)}")

    def _table(self, data: Mapping[str, Any], key: str, *, required: bool) -> dict[str, Any]:
        value = data.get(key)
        if isinstance(value, dict):
            return value
        if required or value is not None:
            self._problems.append(f"{key}: a table [{key}] is needed")
        return {}

    def _text(self, table: Mapping[str, Any], where: str, key: str, *, required: bool = False) -> str:
        return self._typed(
            table, where, key, lambda value: isinstance(value, str) and bool(value), "", "a text", required
        )

    def _words(self, table: Mapping[str, Any], where: str, key: str) -> tuple[str, ...]:
        def is_words(value: Any) -> bool:
            return isinstance(value, list) and bool(value) and all(isinstance(word, str) for word in value)

        return tuple(
            self._typed(table, where, key, is_words, (), 'a list of texts, such as ["node", "agent.js"]', False)
        )

    def _environment(self, table: Mapping[str, Any]) -> dict[str, str]:
        def is_texts(value: Any) -> bool:
            return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())

        found: dict[str, str] = self._typed(table, "agent", "environment", is_texts, {}, "a table of texts", False)
        return found

    def _typed(
        self,
        table: Mapping[str, Any],
        where: str,
        key: str,
        fits: Callable[[Any], bool],
        default: Any,
        what: str,
        required: bool,
    ) -> Any:
        full = f"{where}.{key}" if where else key
        if key not in table:
            if required:
                self._problems.append(f"{full}: is needed: {what}")
            return default
        if not fits(table[key]):
            self._problems.append(f"{full}: must be {what}")
            return default
        return table[key]

    def _json_values(self, settings: Mapping[str, Any], where: str) -> None:
        for key, value in settings.items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                self._problems.append(f"{where}.{key}: must be a text, number, boolean, list or table")


def _value(text: str) -> Any:
    """Reads a value as TOML does; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _hint(word: str, known: Iterable[str]) -> str:
    choices = list(known)
    nearest = difflib.get_close_matches(word, choices, n=1)
    if nearest:
        return f"; did you mean {nearest[0]!r}?"
    return f"; known: {', '.join(choices)}" if choices else ""
