"""Specifications of agents, as the runner's types."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fulmen.agent import FINAL_DIMENSION
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.outcome import MAX_OUTPUT_BYTES
from fulmen_service_kit.isolation.levels import Isolation


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTarget:
    """`file.py:name` or `package.module:name`.

    Attributes:
        target: The callable.
        isolation: Its least isolation; None for the runner's.
    """

    target: str
    isolation: Isolation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandTarget:
    """A program with its arguments; `output_kept_bytes` 0 means the maximum, `isolation` None the runner's."""

    argv: tuple[str, ...]
    output_kept_bytes: int = 0
    isolation: Isolation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerTarget:
    """A Docker container; empty `argv` means the image's command, empty `network` the runner's first."""

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
    """A language model as grader.

    Attributes:
        model: Public model name at the proxy.
        prompt: Template with `{outcome}`; empty for the default prompt.
        dimensions: Dimensions to score.
        min_score: Score that maps to reward 0.
        max_score: Score that maps to reward 1.
        sample_count: Number of verdicts to average.
    """

    model: str
    prompt: str = ""
    dimensions: tuple[str, ...] = (FINAL_DIMENSION,)
    min_score: float = 0.0
    max_score: float = 10.0
    sample_count: int = 1


def check_output_limit(output_kept_bytes: int) -> None:
    """Raises AgentFailed if a specification keeps more output than a report can hold."""
    if not 0 <= output_kept_bytes <= MAX_OUTPUT_BYTES:
        raise AgentFailed(f"max_output_bytes must be between 1 and {MAX_OUTPUT_BYTES}")


Entry = PythonTarget | CommandTarget | ContainerTarget | JobTarget
GraderEntry = PythonTarget | CommandTarget | JudgeTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of one attempt; 0 for the runner's default.

    Attributes:
        memory_bytes: Memory of all its processes.
        cpu_count: Processors; containers and Jobs only.
        process_count: Concurrent processes and threads.
    """

    memory_bytes: int = 0
    cpu_count: float = 0.0
    process_count: int = 0

    def capped(self, maximum: "Limits") -> "Limits":
        """Returns these limits, each at most the limit of `maximum`, which also replaces a 0."""
        return Limits(
            memory_bytes=_capped(self.memory_bytes, maximum.memory_bytes),
            cpu_count=_capped(self.cpu_count, maximum.cpu_count),
            process_count=_capped(self.process_count, maximum.process_count),
        )


def _capped(requested: float, maximum: float) -> Any:
    return min(requested, maximum) if requested and maximum else requested or maximum


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class VenvSource:
    """The virtual environment of an agent; exactly one is set.

    Attributes:
        requirements: File of the bundle with its requirements.
        folder: Absolute path on the runner's machine.
    """

    requirements: str = ""
    folder: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """An agent with its grader.

    Attributes:
        bundle: `resources/{id}/versions/{n}` of its files; empty if it is installed.
        entry: How it is started.
        grader: None if the agent gives its own rewards.
        environment: Its variables; values are templates.
        limits: Limits of one attempt.
        secrets: Names of the secrets that attempts get as variables.
        venv: Its virtual environment; None for the runner's packages.
    """

    bundle: str
    entry: Entry
    grader: GraderEntry | None
    environment: Mapping[str, str]
    limits: Limits = NO_LIMITS
    secrets: tuple[str, ...] = ()
    venv: VenvSource | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """An agent's files as a tar.gz, with the digest."""

    archive: bytes
    sha256_hex: str


def inside_runner(specification: Specification) -> Specification:
    """Returns the specification with all Python callables in the runner's own process, unless they have another Python."""
    if specification.venv is not None:
        return specification
    entry, grader = specification.entry, specification.grader
    if isinstance(entry, PythonTarget):
        entry = replace(entry, isolation=Isolation.TRUSTED)
    if isinstance(grader, PythonTarget):
        grader = replace(grader, isolation=Isolation.TRUSTED)
    return replace(specification, entry=entry, grader=grader)
