"""What is asked of an engine that runs containers, and what it answers; known without its client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PullPolicy = Literal["missing", "always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOrder:
    """A container to run.

    Attributes:
        name: Unique at the engine.
        config: As `POST /containers/create` takes it.
        files: Archives (tar, or tar.gz) that are unpacked at `files_at` before it starts.
        files_at: A directory of the container, a volume.
        stdin: Its standard input.
        result_path: A file that is fetched at its end.
        output_kept_bytes: How much of the end of its standard output is kept.
        output_allowed_bytes: A container that writes more is killed.
        result_allowed_bytes: The most that is fetched of the file.
    """

    name: str
    config: Mapping[str, Any] = field(repr=False)
    files: Sequence[bytes | Path] = field(repr=False)
    files_at: str
    stdin: bytes = field(repr=False)
    result_path: str
    output_kept_bytes: int
    output_allowed_bytes: int
    result_allowed_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerEnd:
    """How a container ended.

    Attributes:
        out_of_memory: True if the kernel killed a process of it for its limit of memory.
        result: The file at `result_path`, empty if there is none.
        result_cut: True if the file is larger than what is fetched.
    """

    exit_code: int
    stdout: str
    stderr: str
    flooded: bool
    out_of_memory: bool
    result: bytes
    result_cut: bool
