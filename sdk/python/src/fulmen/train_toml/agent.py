"""The configuration of an agent: the table `[agent]` of a `train.toml`, and its AgentSpec.

An agent is either a Python callable, a command, a container or a Kubernetes Job. It has at most one grader: a Python
callable, a command or a judge. A setting without effect is reported as a problem.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from fulmen.runner.v1 import agent_spec_pb2
from fulmen.secret_names import secrets_problems
from fulmen.train_toml.reader import TableReader
from fulmen.train_toml.virtual_environment import folder_problem, requirements_problems

__all__ = [
    "AgentConfig",
    "ContainerConfig",
    "JudgeConfig",
    "LimitsConfig",
    "agent_config",
    "agent_spec",
    "checked_environment",
    "read_agent",
]

ISOLATIONS: Final = ("", "trusted", "process", "sandbox")
MAX_JOB_BYTES: Final = 64 * 1024
MAX_PROMPT_BYTES: Final = 64 * 1024
MAX_OUTPUT_BYTES: Final = 65_536
MAX_ENVIRONMENT: Final = 64
MAX_INCLUDED: Final = 256
MAX_DIMENSIONS: Final = 16
MAX_SAMPLES: Final = 9
MAX_PROCESSES: Final = 1_000_000
_DIMENSION: Final = re.compile(r"[a-z0-9_.-]{1,64}")
_ENTRIES: Final = ("python", "command", "container", "job")
_GRADERS: Final = ("grader", "grader_command", "judge")
_SETTINGS: Final = ("isolation", "max_output", "limits", "environment", "secrets", "include", "requirements", "venv")
_ISOLATION_VALUES: Final = {
    "": agent_spec_pb2.ISOLATION_UNSPECIFIED,
    "trusted": agent_spec_pb2.ISOLATION_TRUSTED,
    "process": agent_spec_pb2.ISOLATION_PROCESS,
    "sandbox": agent_spec_pb2.ISOLATION_SANDBOX,
}
_ISOLATION_NAMES: Final = {value: name for name, value in _ISOLATION_VALUES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerConfig:
    """A container of a Docker engine. Without a command, the image's is used; without a network, the runner's."""

    image: str
    command: tuple[str, ...] = ()
    network: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Limits of one attempt; 0 applies the runner's setting. Memory is in bytes."""

    memory_bytes: int = 0
    cpu_count: float = 0.0
    process_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeConfig:
    """A language model as the grader; unset fields have the defaults of the API."""

    model: str
    prompt: str = ""
    dimensions: tuple[str, ...] = ()
    min_score: float | None = None
    max_score: float | None = None
    sample_count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How the agent is started and graded.

    Attributes:
        python: `file.py:name` or `package.module:name`.
        isolation: Least isolation of agent and grader: `trusted`, `process` or `sandbox`; empty for the runner's setting,
            which also applies if it is higher.
        command: A program with its arguments.
        container: A container.
        job: The text of a Kubernetes Job.
        max_output_bytes: Maximum output kept, except of Python callables; 0 means the maximum.
        limits: Limits of one attempt.
        environment: Further environment variables.
        secrets: Names of the project's secrets that its attempts get as environment variables.
        include: Patterns of files to include in its bundle although they would be left out.
        requirements: File in the agent's folder with the packages that it needs; runners install them once.
        venv: Virtual environment on the runners' machine, absolute or relative to the agent's folder.
        grader: A Python callable that grades.
        grader_command: A command that grades.
        judge: A language model that grades.
    """

    python: str = ""
    isolation: str = ""
    command: tuple[str, ...] = ()
    container: ContainerConfig | None = None
    job: str = ""
    max_output_bytes: int = 0
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    requirements: str = ""
    venv: str = ""
    grader: str = ""
    grader_command: tuple[str, ...] = ()
    judge: JudgeConfig | None = None


def read_agent(table: TableReader, folder: Path) -> AgentConfig:
    """Reads the table `[agent]`; adds its problems to the table.

    Args:
        table: the table.
        folder: base of relative paths.
    """
    table.known(*_ENTRIES, *_SETTINGS, *_GRADERS)
    _at_most_one(table)
    agent = AgentConfig(
        python=table.target("python", folder),
        isolation=table.choice("isolation", ISOLATIONS),
        command=table.words("command", '["node", "agent.js"]'),
        container=_container(table.table("container")) if "container" in table else None,
        job=_file(table, "job", folder, MAX_JOB_BYTES),
        max_output_bytes=_output(table),
        limits=_limits(table.table("limits")),
        environment=_environment(table),
        secrets=table.words("secrets", '["WEATHER_KEY"]'),
        include=_included(table),
        requirements=table.text("requirements"),
        venv=table.text("venv"),
        grader=table.target("grader", folder),
        grader_command=table.words("grader_command", '["python", "grade.py"]'),
        judge=_judge(table.table("judge"), folder) if "judge" in table else None,
    )
    for problem in secrets_problems(agent.secrets, tuple(agent.environment)):
        table.problem("secrets", problem)
    _without_effect(table, agent)
    problems, agent = checked_environment(agent, folder)
    for key, problem in problems:
        table.problem(key, problem)
    return agent


def checked_environment(agent: AgentConfig, folder: Path) -> tuple[list[tuple[str, str]], AgentConfig]:
    """Returns the problems of an agent's virtual environment, each with its key, and the agent with its absolute path.

    A program of the environment, such as `.venv/bin/python`, becomes an absolute path as well: it is not in the
    bundle.
    """
    problems: list[tuple[str, str]] = []
    if agent.requirements and agent.venv:
        problems.append(("venv", "give requirements or venv, not both"))
    if (agent.requirements or agent.venv) and (agent.container or agent.job):
        key = "requirements" if agent.requirements else "venv"
        problems.append((key, "only for Python and command agents: install packages in the container's image"))
    if agent.requirements:
        file = Path(os.path.normpath(folder.absolute() / agent.requirements))
        if file.is_relative_to(folder.absolute()):
            problems += (("requirements", problem) for problem in requirements_problems(file))
            agent = replace(agent, requirements=str(file.relative_to(folder.absolute())))
        else:
            problems.append(("requirements", f"{file} is not in the agent's folder, from which the bundle is made"))
    if not agent.venv:
        return problems, agent
    # Not resolved: its interpreter finds its packages by the name that it is started with.
    venv = Path(os.path.normpath(folder.absolute() / agent.venv))
    if problem := folder_problem(venv, runs_callables=bool(agent.python or agent.grader)):
        problems.append(("venv", problem))
    return problems, replace(
        agent,
        venv=str(venv),
        command=_in_environment(agent.command, venv, folder),
        grader_command=_in_environment(agent.grader_command, venv, folder),
    )


def _in_environment(command: tuple[str, ...], venv: Path, folder: Path) -> tuple[str, ...]:
    if not command or "/" not in command[0]:
        return command
    program = Path(os.path.normpath(folder.absolute() / command[0]))
    return (str(program), *command[1:]) if program.is_relative_to(venv) else command


def agent_spec(agent: AgentConfig, bundle: str) -> agent_spec_pb2.AgentSpec:
    """Returns the agent spec, which defines how to start and grade the agent.

    Args:
        agent: the agent.
        bundle: `resources/{id}/versions/{n}` of its files; empty if it is installed on the runners.
    """
    spec = agent_spec_pb2.AgentSpec(bundle=bundle, environment=dict(agent.environment), secrets=agent.secrets)
    isolation = _ISOLATION_VALUES[agent.isolation]
    if agent.python:
        spec.python.target = agent.python
        spec.python.isolation = isolation
    elif agent.container is not None:
        spec.container.image = agent.container.image
        spec.container.argv.extend(agent.container.command)
        spec.container.network = agent.container.network
        spec.container.max_output_bytes = agent.max_output_bytes
    elif agent.job:
        spec.job.template = agent.job
        spec.job.max_output_bytes = agent.max_output_bytes
    else:
        spec.command.argv.extend(agent.command)
        spec.command.max_output_bytes = agent.max_output_bytes
        spec.command.isolation = isolation
    if agent.limits != LimitsConfig():
        limits = agent.limits
        spec.limits.memory_bytes = limits.memory_bytes
        spec.limits.cpu_count = limits.cpu_count
        spec.limits.process_count = limits.process_count
    if agent.grader:
        spec.grader.python.target = agent.grader
        spec.grader.python.isolation = isolation
    elif agent.grader_command:
        spec.grader.command.argv.extend(agent.grader_command)
        spec.grader.command.isolation = isolation
    elif agent.judge is not None:
        _write_judge(agent.judge, spec.grader.judge)
    if agent.requirements:
        spec.virtual_environment.requirements = agent.requirements
    elif agent.venv:
        spec.virtual_environment.folder = agent.venv
    return spec


def agent_config(spec: agent_spec_pb2.AgentSpec) -> AgentConfig:
    """Converts a published agent spec back; omits what the table cannot express, such as the bundle."""
    entry = spec.WhichOneof("entry")
    grader = spec.grader.WhichOneof("entry")
    # The table has one setting for both; if they differ, the agent's is used.
    entries = (spec.python, spec.command, spec.grader.python, spec.grader.command)
    isolation = next((each.isolation for each in entries if each.isolation), agent_spec_pb2.ISOLATION_UNSPECIFIED)
    # At most one of the three is set; the sizes of the others are 0.
    sizes = (spec.command.max_output_bytes, spec.container.max_output_bytes, spec.job.max_output_bytes)
    return AgentConfig(
        python=spec.python.target,
        # By the contract, an unknown value is the highest known one.
        isolation=_ISOLATION_NAMES.get(isolation, "sandbox"),
        command=tuple(spec.command.argv),
        container=ContainerConfig(
            image=spec.container.image, command=tuple(spec.container.argv), network=spec.container.network
        )
        if entry == "container"
        else None,
        job=spec.job.template,
        max_output_bytes=max(sizes),
        limits=LimitsConfig(
            memory_bytes=spec.limits.memory_bytes,
            cpu_count=spec.limits.cpu_count,
            process_count=spec.limits.process_count,
        ),
        environment=dict(spec.environment),
        secrets=tuple(spec.secrets),
        requirements=spec.virtual_environment.requirements,
        venv=spec.virtual_environment.folder,
        grader=spec.grader.python.target,
        grader_command=tuple(spec.grader.command.argv),
        judge=_judge_of(spec.grader.judge) if grader == "judge" else None,
    )


def _write_judge(judge: JudgeConfig, entry: agent_spec_pb2.JudgeEntry) -> None:
    entry.model = judge.model
    entry.prompt = judge.prompt
    entry.dimensions.extend(judge.dimensions)
    entry.sample_count = judge.sample_count
    if judge.min_score is not None:
        entry.min_score = judge.min_score
    if judge.max_score is not None:
        entry.max_score = judge.max_score


def _judge_of(entry: agent_spec_pb2.JudgeEntry) -> JudgeConfig:
    return JudgeConfig(
        model=entry.model,
        prompt=entry.prompt,
        dimensions=tuple(entry.dimensions),
        min_score=entry.min_score if entry.HasField("min_score") else None,
        max_score=entry.max_score if entry.HasField("max_score") else None,
        sample_count=entry.sample_count,
    )


def _at_most_one(table: TableReader) -> None:
    if sum(key in table for key in _ENTRIES) != 1:
        table.problem(
            "",
            'give one of python = "file.py:name", command = ["program", ...], container = {image = "..."} and '
            'job = "job.yaml"',
        )
    if sum(key in table for key in _GRADERS) > 1:
        table.problem("", "give one of grader, grader_command and judge, not several")


def _container(table: TableReader) -> ContainerConfig:
    table.known("image", "command", "network")
    return ContainerConfig(
        image=table.text("image", required=True),
        command=table.words("command", '["node", "agent.js"]'),
        network=table.text("network"),
    )


def _limits(table: TableReader) -> LimitsConfig:
    table.known("memory", "cpus", "processes")
    cpus = table.number("cpus")
    if cpus is not None and cpus <= 0:
        table.problem("cpus", "must be greater than 0")
    return LimitsConfig(
        memory_bytes=table.size("memory"),
        cpu_count=cpus or 0.0,
        process_count=table.whole_number("processes", least=1, most=MAX_PROCESSES),
    )


def _judge(table: TableReader, folder: Path) -> JudgeConfig:
    table.known("model", "prompt", "prompt_file", "dimensions", "min", "max", "samples")
    if "prompt" in table and "prompt_file" in table:
        table.problem("", "give prompt or prompt_file, not both")
    dimensions = table.words("dimensions", '["correct", "polite"]')
    if len(dimensions) > MAX_DIMENSIONS:
        table.problem("dimensions", f"at most {MAX_DIMENSIONS}")
    for word in dimensions:
        if not _DIMENSION.fullmatch(word):
            table.problem("dimensions", f"{word!r}: 1 to 64 characters of a-z, 0-9, '_', '.' and '-'")
    if len(set(dimensions)) < len(dimensions):
        table.problem("dimensions", "must be unique")
    low, high = table.number("min"), table.number("max")
    # The defaults of the contract.
    if (0.0 if low is None else low) >= (10.0 if high is None else high):
        table.problem("max", "must be greater than min (defaults: 0 and 10)")
    return JudgeConfig(
        model=table.text("model", required=True),
        prompt=table.text("prompt") or _file(table, "prompt_file", folder, MAX_PROMPT_BYTES),
        dimensions=dimensions,
        min_score=low,
        max_score=high,
        sample_count=table.whole_number("samples", least=1, most=MAX_SAMPLES),
    )


def _output(table: TableReader) -> int:
    size_bytes = table.size("max_output")
    if size_bytes > MAX_OUTPUT_BYTES:
        table.problem("max_output", f"at most {MAX_OUTPUT_BYTES} bytes")
    return size_bytes


def _environment(table: TableReader) -> dict[str, str]:
    environment = table.texts("environment")
    if len(environment) > MAX_ENVIRONMENT:
        table.problem("environment", f"at most {MAX_ENVIRONMENT} variables")
    return environment


def _included(table: TableReader) -> tuple[str, ...]:
    include = table.words("include", '["certs/test.pem", "node_modules/"]')
    if len(include) > MAX_INCLUDED:
        table.problem("include", f"at most {MAX_INCLUDED} patterns")
    return include


def _file(table: TableReader, key: str, folder: Path, most_bytes: int) -> str:
    """Returns the text of the file that a key names; empty if unset."""
    name = table.text(key)
    if not name:
        return ""
    path = (folder / name).resolve()
    try:
        content = path.read_bytes()
        text = content.decode()
    except UnicodeDecodeError:
        table.problem(key, f"{path} is not UTF-8")
        return ""
    except OSError as error:
        table.problem(key, f"the file {path} cannot be read: {error.strerror}")
        return ""
    if not 0 < len(content) <= most_bytes:
        table.problem(key, f"{path} has {len(content)} bytes: must have 1 to {most_bytes}")
    return text


def _without_effect(table: TableReader, agent: AgentConfig) -> None:
    """Reports settings without effect."""
    if agent.isolation and not (agent.python or agent.command or agent.grader or agent.grader_command):
        table.problem(
            "isolation", "only for Python and command agents and graders: containers and jobs are always isolated"
        )
    if agent.python and agent.max_output_bytes:
        table.problem("max_output", "not for Python agents: the return value is the outcome")
    in_process = agent.isolation not in ("process", "sandbox") and not (agent.requirements or agent.venv)
    if agent.python and in_process and agent.limits != LimitsConfig():
        table.problem("limits", 'cannot be enforced inside the runner: add isolation = "process"')
    elif agent.limits.cpu_count and not (agent.container or agent.job):
        table.problem("limits.cpus", "only for containers and jobs")
