"""How an agent is to be run, as its publisher wrote it, in the runner's own words."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonTarget:
    """`file.py:name` or `package.module:name`."""

    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandTarget:
    """A program with its arguments; `output_kept_bytes` 0 means the most that is allowed."""

    argv: tuple[str, ...]
    output_kept_bytes: int = 0


Target = PythonTarget | CommandTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Specification:
    """An agent.

    Attributes:
        bundle: `resources/{id}/versions/{n}` of its files; empty if it is installed.
        grader: None if the agent scores itself.
        environment: Variables that its publisher gave it.
    """

    bundle: str
    entry: Target
    grader: Target | None
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """An agent's files as a tar.gz, and their digest."""

    archive: bytes
    sha256_hex: str
