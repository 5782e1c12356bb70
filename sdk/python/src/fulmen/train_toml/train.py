"""The format of `train.toml`: policy, agent, data and stages.

Reading is strict: an unknown key is an error with the nearest known key, and all problems of a file are reported
together. Settings of a stage belong to its algorithm and are checked by the algorithm service.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from fulmen.models.base_names import base_problem
from fulmen.train_toml.agent import AgentConfig, read_agent
from fulmen.train_toml.reader import ConfigError, TableReader, hint, is_file, is_json, parsed_toml

__all__ = [
    "AgentConfig",
    "ConfigError",
    "DataConfig",
    "PolicyConfig",
    "StageConfig",
    "TrainConfig",
    "load_agent_and_data",
    "load_train_config",
    "named_problems",
    "read_train_config",
    "with_overrides",
]

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_SCORES: Final = re.compile(r"[a-z0-9._-]{1,128}(@[a-z0-9._-]{1,63})?")
_TRAINING_RUN: Final = re.compile(r"(projects/[a-z0-9-]{1,63}/trainingRuns/)?[a-z0-9-]{1,63}")
_KEYS: Final = ("name", "policy", "agent", "data", "stage")
_POLICY_KEYS: Final = ("name", "base", "build", "path", "version")
_RUN_NAME: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The policy and the source of its first weights; at most one of the four sources is set.

    Without a name no policy is trained: the stages evaluate, or improve a prompt.
    """

    name: str = ""
    base: str = ""
    build: str = ""
    path: str = ""
    version: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """The data of the stages; files as absolute paths.

    Attributes:
        train: tasks, JSONL.
        validation: tasks, JSONL.
        test: tasks, JSONL.
        demonstrations: conversations, JSONL.
        validation_demonstrations: conversations that are not trained on, JSONL.
        preferences: pairs of answers to the same prompt, JSONL.
        prompt: the agent's prompt, a text file.
        scores: published scores, as `NAME` or `NAME@VERSION`.
        rollouts: training run whose stored rollouts are read, its name or its id; empty for none.
    """

    train: Path | None = None
    validation: Path | None = None
    test: Path | None = None
    demonstrations: Path | None = None
    validation_demonstrations: Path | None = None
    preferences: Path | None = None
    prompt: Path | None = None
    scores: str = ""
    rollouts: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are set; published separately from the agent."""
        tasks = (self.train, self.validation, self.test)
        others = (self.demonstrations, self.validation_demonstrations, self.preferences, self.prompt)
        return tuple(path for path in (*tasks, *others) if path is not None)

    @property
    def uses(self) -> tuple[str, ...]:
        """The inputs of runs that are set, such as `train_tasks`; without the run of `rollouts`."""
        tasks = {"train_tasks": self.train, "validation_tasks": self.validation, "test_tasks": self.test}
        others = ("demonstrations", "validation_demonstrations", "preferences", "prompt", "scores")
        named = tasks | {use: getattr(self, use) for use in others}
        return tuple(use for use, given in named.items() if given)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageConfig:
    """One training run: an algorithm and its settings."""

    algorithm: str
    settings: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """A whole `train.toml`; `folder` contains it, and becomes the agent's bundle.

    Without an agent no stage makes rollouts: the stages imitate conversations, or train on existing rollouts.
    """

    file: Path
    name: str
    policy: PolicyConfig
    agent: AgentConfig | None
    data: DataConfig
    stages: tuple[StageConfig, ...]

    @property
    def folder(self) -> Path:
        """The folder of the file, the base of relative paths in it."""
        return self.file.parent

    @property
    def runs_code(self) -> bool:
        """Whether the folder has code to run, an agent or a function that builds weights, so that a bundle is needed."""
        return self.agent is not None or bool(self.policy.build)

    @property
    def secrets(self) -> tuple[str, ...]:
        """Names of the secrets that attempts of the agent get."""
        return () if self.agent is None else self.agent.secrets


def load_train_config(path: Path) -> TrainConfig:
    """Reads and checks a `train.toml`.

    Raises:
        ConfigError: if it is invalid; lists all problems.
    """
    config, problems = read_train_config(path)
    if problems:
        raise ConfigError(f"{path} is not valid.", problems)
    return config


def read_train_config(path: Path) -> tuple[TrainConfig, list[str]]:
    """Reads a `train.toml`; returns its valid parts and every problem.

    Raises:
        ConfigError: if it is not TOML.
    """
    data, problems = parsed_toml(path), list[str]()
    return _config(path.resolve(), TableReader(data, "", problems), data.get("stage")), problems


def load_agent_and_data(path: Path) -> tuple[AgentConfig, DataConfig]:
    """Reads the parts of a `train.toml` that an attempt needs; the rest may be missing, and only its keys are checked.

    Raises:
        ConfigError: if it is invalid; lists all problems.
    """
    folder, problems = path.resolve().parent, list[str]()
    table = TableReader(parsed_toml(path), "", problems)
    table.known(*_KEYS)
    table.table("policy").known(*_POLICY_KEYS)
    agent, data = read_agent(table.table("agent", required=True), folder), _data(table.table("data"), folder)
    if problems:
        raise ConfigError(f"{path} is not valid.", problems)
    return agent, data


def with_overrides(config: TrainConfig, assignments: Iterable[str], *, seed: int | None = None) -> TrainConfig:
    """Replaces settings of stages.

    Args:
        config: the configuration.
        assignments: each `algorithm.setting=value`, the value as in TOML; a bare word is a string. Dots separate
            tables, as in `grpo.loss.kind=gspo`.
        seed: value of the setting `seed` of every stage; None leaves it unchanged.

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
            problems.append(f"--set {assignment}: no stage has the algorithm {algorithm!r}{hint(algorithm, known)}")
        for index in chosen:
            _put(stages[index], setting.split("."), _value(text.strip()))
    if problems:
        raise ConfigError("The overrides are not valid.", problems)
    if seed is not None:
        for settings in stages:
            settings["seed"] = seed
    merged = tuple(replace(old, settings=new) for old, new in zip(config.stages, stages, strict=True))
    return replace(config, stages=merged)


def _put(settings: dict[str, Any], path: list[str], value: Any) -> None:
    """Sets a value in nested tables, and keeps their other values."""
    *folders, key = path
    for name in folders:
        inner = settings.get(name)
        settings[name] = dict(inner) if isinstance(inner, Mapping) else {}
        settings = settings[name]
    settings[key] = value


def named_problems(name: str, policy: str) -> list[str]:
    """Returns the problems of the names of a configuration and its policy."""
    problems = [f"name: {problem}" for problem in _name_problems(name)]
    return problems + [f"policy: {problem}" for problem in _policy_name_problems(policy)]


def _name_problems(name: str) -> list[str]:
    if not name or _RUN_NAME.fullmatch(name):
        return []
    return ["at most 32 characters of a-z, 0-9 and -, beginning with a letter or digit"]


def _policy_name_problems(name: str) -> list[str]:
    return ["1 to 63 characters of a-z, 0-9, '.', '_' and '-'"] if name and not _NAME.fullmatch(name) else []


def _config(file: Path, table: TableReader, stages: Any) -> TrainConfig:
    table.known(*_KEYS)
    name = table.text("name", required=True)
    for problem in _name_problems(name):
        table.problem("name", problem)
    return TrainConfig(
        file=file,
        name=name,
        policy=_policy(table.table("policy"), file.parent, required="policy" in table),
        agent=read_agent(table.table("agent"), file.parent) if "agent" in table else None,
        data=_data(table.table("data", required=True), file.parent),
        stages=_stages(table, stages),
    )


def _policy(table: TableReader, folder: Path, *, required: bool) -> PolicyConfig:
    table.known(*_POLICY_KEYS)
    policy = PolicyConfig(
        name=table.text("name", required=required),
        base=table.text("base"),
        build=table.target("build", folder),
        path=table.text("path"),
        version=table.text("version"),
    )
    for problem in _policy_name_problems(policy.name):
        table.problem("name", problem)
    if sum(map(bool, (policy.base, policy.build, policy.path, policy.version))) > 1:
        table.problem("", "give one of base, build, path and version, not several")
    if policy.base and (problem := base_problem(policy.base)):
        table.problem("base", f"{problem}; for a folder use path")
    if policy.path:
        policy = replace(policy, path=str((folder / policy.path).resolve()))
        if not is_file(Path(policy.path), folder=True):
            table.problem("path", f"there is no folder {policy.path}")
    return policy


def _data(table: TableReader, folder: Path) -> DataConfig:
    uses = ("train", "validation", "test", "demonstrations", "validation_demonstrations", "preferences", "prompt")
    table.known(*uses, "scores", "rollouts")
    paths: dict[str, Path | None] = {}
    for use in uses:
        text = table.text(use)
        path = (folder / text).resolve() if text else None
        if path is not None and not is_file(path):
            table.problem(use, f"there is no file {path}")
        paths[use] = path
    scores = table.text("scores")
    if scores and not _SCORES.fullmatch(scores):
        table.problem("scores", "the name of published scores, such as scores.better or scores.better@2")
    rollouts = table.text("rollouts")
    if rollouts and not _TRAINING_RUN.fullmatch(rollouts):
        table.problem("rollouts", "the id of a training run, such as arithmetic-20260314-101500-x7k2-2-grpo")
    return DataConfig(**paths, scores=scores, rollouts=rollouts)


def _stages(config: TableReader, tables: Any) -> tuple[StageConfig, ...]:
    if not isinstance(tables, list) or not tables:
        config.problem("stage", "at least one [[stage]] is required")
        return ()
    stages = []
    for number, table in enumerate(tables, start=1):
        where = f"stage {number}"
        if not isinstance(table, dict):
            config.problem(where, "write it as [[stage]]")
            continue
        settings = {key: value for key, value in table.items() if key != "algorithm"}
        for key, value in settings.items():
            if not is_json(value):
                config.problem(f"{where}.{key}", "must be a text, number, boolean, list or table")
        algorithm = config.nested(table, where).text("algorithm", required=True)
        stages.append(StageConfig(algorithm=algorithm, settings=settings))
    return tuple(stages)


def _value(text: str) -> Any:
    """Parses a value as in TOML; a bare word is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
