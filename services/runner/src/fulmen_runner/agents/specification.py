"""How an agent is to be run, as its publisher wrote it, in the runner's own words."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from fulmen.agent import FINAL_DIMENSION


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTarget:
    """`file.py:name` or `package.module:name`.

    Attributes:
        own_process: Whether it runs in a child that can be killed; None leaves that to the runner's setting.
    """

    target: str
    own_process: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandTarget:
    """A program with its arguments; `output_kept_bytes` 0 means the most that is allowed."""

    argv: tuple[str, ...]
    output_kept_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerTarget:
    """A container of a Docker engine; `argv` empty means the image's own command, `network` empty the runner's."""

    image: str
    argv: tuple[str, ...] = ()
    output_kept_bytes: int = 0
    network: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTarget:
    """A Kubernetes Job; `template` is its manifest, YAML or JSON."""

    template: str
    output_kept_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTarget:
    """A language model that scores.

    Attributes:
        model: Its public name at the model proxy.
        prompt: A template with `{outcome}`; empty means the general one.
        dimensions: What is scored.
        min_score: What becomes 0.
        max_score: What becomes 1.
        sample_count: How often it is asked; the mean counts.
    """

    model: str
    prompt: str = ""
    dimensions: tuple[str, ...] = (FINAL_DIMENSION,)
    min_score: float = 0.0
    max_score: float = 10.0
    sample_count: int = 1


Entry = PythonTarget | CommandTarget | ContainerTarget | JobTarget
GraderEntry = PythonTarget | CommandTarget | JudgeTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one attempt may use; 0 means as the runner is set.

    Attributes:
        memory_bytes: Of all its processes together.
        cpu_count: Processors; containers and Jobs only.
        process_count: Processes and threads at once.
    """

    memory_bytes: int = 0
    cpu_count: float = 0.0
    process_count: int = 0


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """An agent.

    Attributes:
        bundle: `resources/{id}/versions/{n}` of its files; empty if it is installed.
        grader: None if the agent scores itself.
        environment: Variables that its publisher gave it; values are templates.
        limits: What an attempt of it may use.
    """

    bundle: str
    entry: Entry
    grader: GraderEntry | None
    environment: Mapping[str, str]
    limits: Limits = NO_LIMITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """An agent's files as a tar.gz, and their digest."""

    archive: bytes
    sha256_hex: str


def inside_runner(specification: Specification) -> Specification:
    """Returns the same with Python callables in the runner's own process, whatever they ask for."""
    entry, grader = specification.entry, specification.grader
    if isinstance(entry, PythonTarget):
        entry = replace(entry, own_process=False)
    if isinstance(grader, PythonTarget):
        grader = replace(grader, own_process=False)
    return replace(specification, entry=entry, grader=grader)
