"""Requests to and results of a container engine, importable without its client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

PullPolicy = Literal["missing", "always", "never"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerOrder:
    """A container to run.

    Attributes:
        name: Unique name at the engine.
        config: Body of `POST /containers/create`.
        files: Archives (tar or tar.gz) unpacked at `files_at` before the start.
        files_at: Directory of the container, a volume.
        stdin: Standard input.
        result_path: Path of the file fetched at the end.
        output_kept_bytes: Size of the end of standard output that is kept.
        output_allowed_bytes: Output above which the container is killed.
        result_allowed_bytes: Maximum size fetched of the file.
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
    """The end of a container.

    Attributes:
        exit_code: Exit code.
        stdout: End of its standard output.
        stderr: End of its standard error.
        flooded: Whether it exceeded the allowed output.
        out_of_memory: Whether the kernel killed a process for exceeding the memory limit.
        result: Content of the file at `result_path`, empty if there is none.
        result_cut: Whether the file is larger than allowed.
    """

    exit_code: int
    stdout: str
    stderr: str
    flooded: bool
    out_of_memory: bool
    result: bytes
    result_cut: bool
