"""The arguments of `client.train`, as the configuration of an equivalent `train.toml`.

The rules are the same as for `train.toml`: arguments become its tables and are read by the same code.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias, TypedDict

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.models.base_names import HUB_PREFIX, MODEL_PREFIX, base_problem
from fulmen.rpc.services import Services
from fulmen.store.v1 import resource_service_pb2
from fulmen.train_toml.agent import AgentConfig, JudgeConfig, checked_environment, read_agent
from fulmen.train_toml.reader import ConfigError, TableReader, is_target
from fulmen.train_toml.train import DataConfig, PolicyConfig, StageConfig, TrainConfig, named_problems
from fulmen.training.agent_secrets import require_secrets
from fulmen.training.algorithm import Algorithm
from fulmen.training.bundle import Bundle, pack_bundle
from fulmen.training.functions import FILE, packed_functions
from fulmen.training.plan import RunNames
from fulmen.training.publish import publish
from fulmen.training.task_files import Dataset, checked_datasets
from fulmen.training.tasks import Tasks, task_lines
from fulmen.training.training import Training

__all__ = ["Agent", "Base", "Reward", "TrainOptions", "given_training", "publish_given_agent"]

Agent: TypeAlias = str | Sequence[str] | Callable[..., Any] | AgentConfig
Reward: TypeAlias = str | Sequence[str] | Callable[..., Any] | JudgeConfig | None
Base: TypeAlias = str | PathLike[str] | Callable[..., Any] | object | None

WHERE: Final = Path("client.train")
POLICIES: Final = "resources/policy."
_PACKAGES: Final = frozenset({"requirements", "venv"})
_ROLES: Final = {"agent": "python", "reward": "grader", "base": "build"}


class TrainOptions(TypedDict, total=False):
    """Further arguments of `client.train`.

    Attributes:
        name: Name of the agent, the data and the runs, at most 32 characters of [a-z0-9-]; by default the agent's.
        policy: Name of the policy, which is the model that the agent calls; by default the policy of `base`,
            otherwise `name`.
        folder: Folder of the agent's files, which is bundled; by default the folder of the given paths, for commands
            the current folder, and for functions none.
        test: Tasks for a test after the training, in the forms of `tasks`.
        demonstrations: Conversations to imitate, dicts with `messages`, as `tasks`.
        validation_demonstrations: Conversations that are not trained on, likewise.
        preferences: Pairs of answers, dicts with `prompt`, `chosen` and `rejected`, as `tasks`.
        prompt: Path of the agent's prompt, a text file.
        requirements: File in the agent's folder with the packages that the agent needs; runners install them once.
        venv: Virtual environment on the runners' machine that the agent runs in; paths are relative to the folder.
    """

    name: str
    policy: str
    folder: str | PathLike[str]
    test: Tasks
    demonstrations: Tasks
    validation_demonstrations: Tasks
    preferences: Tasks
    prompt: str | PathLike[str]
    requirements: str | PathLike[str]
    venv: str | PathLike[str]


async def given_training(services: Services, project: str, given: Mapping[str, Any], options: TrainOptions) -> Training:
    """Returns the training that arguments of `client.train` describe, checked as far as this machine can.

    Raises:
        ConfigError: with every problem that was found.
        ExtraMissing: if a library is not installed.
        ResourceNotFound: if the policy that `base` names does not exist.
    """
    folder = _folder(given, options)
    name = options.get("name") or _name_of(given["agent"])
    version = await _version(services, project, given["base"])
    config = _config(given, options, name=name, folder=folder, version=version)
    await require_secrets(services, config.secrets)
    bundle, datasets = await asyncio.to_thread(_packed, given, options, config, folder)
    names = RunNames.now(project, name)
    return Training(services=services, config=config, bundle=bundle, datasets=datasets, names=names)


async def publish_given_agent(
    services: Services, name: str, agent: Agent, *, reward: Reward, folder: str | PathLike[str] | None
) -> str:
    """Publishes an agent without a training; returns its version, `resources/agent.{name}/versions/{n}`.

    Raises:
        ConfigError: with every problem that was found.
        ExtraMissing: if a library is not installed.
    """
    given = {"agent": agent, "reward": reward, "base": None}
    found = _folder(given, {} if folder is None else {"folder": folder})
    problems = named_problems(name, "")
    config = _agent(given, {}, found or Path(), problems)
    if problems:
        raise ConfigError("The agent is not valid; nothing was created.", problems)
    await require_secrets(services, config.secrets)
    bundle = await asyncio.to_thread(_bundle, given, config, found)
    published = await publish(services, name=name, agent=config, bundle=bundle, datasets={})
    return published.inputs["agent"]


def _packed(
    given: Mapping[str, Any], options: TrainOptions, config: TrainConfig, folder: Path | None
) -> tuple[Bundle, dict[str, Dataset]]:
    data = {
        "train_tasks": ("tasks", given["tasks"]),
        "validation_tasks": ("validation", given["validation"]),
        "test_tasks": ("test", options.get("test")),
        "demonstrations": ("demonstrations", options.get("demonstrations")),
        "validation_demonstrations": ("validation_demonstrations", options.get("validation_demonstrations")),
        "preferences": ("preferences", options.get("preferences")),
    }
    datasets = checked_datasets(
        {use: (label, task_lines(tasks, label)) for use, (label, tasks) in data.items() if tasks is not None}
    )
    return _bundle(given, config.agent, folder if config.runs_code else None), datasets


def _bundle(given: Mapping[str, Any], agent: AgentConfig | None, folder: Path | None) -> Bundle:
    functions = {role: given[role] for role in _ROLES if _is_function(given[role])}
    with packed_functions(functions, folder) as added:
        if folder is None and agent is not None and agent.requirements:
            added = {**added, agent.requirements: Path(agent.requirements)}
        return pack_bundle(folder, agent=agent, added=added)


def _config(
    given: Mapping[str, Any], options: TrainOptions, *, name: str, folder: Path | None, version: str
) -> TrainConfig:
    problems: list[str] = []
    alone = given["agent"] is None and given["reward"] is None and not _PACKAGES & options.keys()
    agent = None if alone else _agent(given, options, folder or Path(), problems)
    base = given["base"]
    policy = PolicyConfig(name=options.get("policy") or _policy_of(version) or name, version=version)
    if _is_function(base):
        policy = replace(policy, build=f"{FILE}:base")
    elif not version and base is not None:
        policy = _policy(policy, str(base), folder or Path(), problems)
    problems += named_problems(name, policy.name)
    algorithms = [given["algorithm"]] if isinstance(given["algorithm"], Algorithm | str) else given["algorithm"]
    stages = [each if isinstance(each, Algorithm) else Algorithm(each) for each in algorithms]
    if not stages:
        problems.append("algorithm: at least one is required")
    prompt = Path(options["prompt"]).resolve() if "prompt" in options else None
    if problems:
        raise ConfigError(f"{WHERE} is not valid; nothing was created.", problems)
    return TrainConfig(
        file=WHERE,
        name=name,
        policy=policy,
        agent=agent,
        data=DataConfig(prompt=prompt),
        stages=tuple(StageConfig(algorithm=each.name, settings=each.settings) for each in stages),
    )


def _agent(given: Mapping[str, Any], options: TrainOptions, folder: Path, problems: list[str]) -> AgentConfig:
    """Returns the agent with its grader, read as the table [agent] would be."""
    packages = {key: str(value) for key, value in options.items() if key in _PACKAGES}
    agent, reward = given["agent"], given["reward"]
    if isinstance(agent, AgentConfig):
        if reward is not None:
            problems.append("reward: set the grader in the AgentConfig instead")
        problems += (f"{key}: set it in the AgentConfig instead" for key in packages)
        found, agent = checked_environment(agent, folder)
        problems += (f"agent.{key}: {problem}" for key, problem in found)
        return agent
    table: dict[str, Any] = packages | _entry(agent, "python", "command", folder)
    table |= _entry(reward, "grader", "grader_command", folder)
    config = read_agent(TableReader(table, "", problems), folder)
    if isinstance(reward, JudgeConfig):
        config = replace(config, judge=reward)
    if _is_function(agent):
        config = replace(config, python=f"{FILE}:agent")
    return replace(config, grader=f"{FILE}:reward") if _is_function(reward) else config


def _entry(given: Any, python: str, command: str, folder: Path) -> dict[str, Any]:
    if given is None or isinstance(given, JudgeConfig):
        return {}
    if _is_function(given):
        # Its file is made when the bundle is packed; a module is not looked for.
        return {python: "fulmen_functions:of_python"}
    if isinstance(given, str) and is_target(given):
        return {python: _within(given, folder)}
    return {command: shlex.split(given) if isinstance(given, str) else list(given)}


def _policy(policy: PolicyConfig, base: str, folder: Path, problems: list[str]) -> PolicyConfig:
    if base.startswith((HUB_PREFIX, MODEL_PREFIX)):
        if problem := base_problem(base):
            problems.append(f"base: {problem}")
        return replace(policy, base=base)
    if Path(base).is_dir():
        return replace(policy, path=str(Path(base).resolve()))
    if is_target(base):
        return replace(policy, build=_within(base, folder))
    problems.append(f"base: there is no folder or policy {base!r}")
    return policy


async def _version(services: Services, project: str, base: Any) -> str:
    """Returns the version that `base` names; empty if it is something else."""
    if base is None or _is_function(base) or isinstance(base, PathLike):
        return ""
    named = base if isinstance(base, str) else getattr(base, "policy_version", "") or getattr(base, "name", "")
    if named.startswith(POLICIES) and "/versions/" in named:
        return str(named)
    if named.startswith((HUB_PREFIX, MODEL_PREFIX)) or is_target(named) or Path(named).is_dir():
        return ""
    name = named if named.startswith(POLICIES) else f"{POLICIES}{named}"
    request = resource_service_pb2.GetResourcesRequest(names=[name], project=project)
    return str((await services.resources.GetResources(request)).resources[0].name)


async def given_policy(services: Services, project: str, name: str, base: Any) -> training_run_pb2.PolicySpec:
    """Returns the policy from which a trainer starts, from the argument `base` of `client.trainer`.

    Raises:
        ResourceNotFound: if `base` is neither a folder nor a policy.
    """
    place = str(base) if isinstance(base, str | PathLike) else ""
    if place.startswith((HUB_PREFIX, MODEL_PREFIX)):
        return training_run_pb2.PolicySpec(name=name, base=place)
    if Path(place).is_absolute() or (place and Path(place).is_dir()):
        return training_run_pb2.PolicySpec(name=name, path=str(Path(place).absolute()))
    version = await _version(services, project, base)
    policy = training_run_pb2.PolicySpec(name=name or _policy_of(version))
    if version:
        policy.version = version
    return policy


def _policy_of(version: str) -> str:
    return version.split("/")[1].removeprefix("policy.") if version else ""


def _folder(given: Mapping[str, Any], options: TrainOptions) -> Path | None:
    """Returns the folder to bundle: the given one, or the folder of the first path."""
    if "folder" in options:
        return Path(options["folder"]).resolve()
    for role in _ROLES:
        value = given[role]
        if isinstance(value, str) and is_target(value) and value.partition(":")[0].endswith(".py"):
            return Path(value.partition(":")[0]).resolve().parent
    commands = [given[role] for role in ("agent", "reward") if isinstance(given[role], str | list | tuple)]
    return Path.cwd() if commands else None


def _within(target: str, folder: Path) -> str:
    """Returns a target whose file is relative to the folder."""
    file, _, name = target.partition(":")
    path = Path(file).resolve()
    if not file.endswith(".py") or not path.is_file() or not path.is_relative_to(folder.resolve()):
        return target
    return f"{path.relative_to(folder.resolve())}:{name}"


def _name_of(agent: Any) -> str:
    """Returns a name made of the agent's: of its function, its file or its program."""
    if isinstance(agent, AgentConfig):
        agent = agent.python or agent.command or (agent.container.image if agent.container is not None else "agent")
    if isinstance(agent, str) and is_target(agent):
        agent = Path(agent.partition(":")[0]).stem
    word = agent.__name__ if callable(agent) and hasattr(agent, "__name__") else agent
    word = word if isinstance(word, str) else " ".join(map(str, word)) if isinstance(word, Sequence) else "agent"
    slug = re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-")
    return slug[:32].strip("-") or "agent"


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type)
