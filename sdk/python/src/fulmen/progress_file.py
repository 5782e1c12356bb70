"""The file in which a command or a child process reports its progress to its runner.

`FULMEN_PROGRESS_FILE` names the file. It holds one line of JSON, of at most 4096 bytes, and each report replaces the last:

    {"fraction": 0.25, "text": "3 of 12 files"}    either member may be missing

Imports only the standard library: programs without Fulmen use it, too. The runner reads the file every two seconds.
"""

from __future__ import annotations

import json
import os
from typing import Final

__all__ = ["PROGRESS_FILE_VARIABLE", "write_progress"]

PROGRESS_FILE_VARIABLE: Final = "FULMEN_PROGRESS_FILE"


def write_progress(path: str, *, fraction: float | None, text: str) -> None:
    """Replaces the report in a file; creates it if missing."""
    report: dict[str, object] = {"text": text} if fraction is None else {"fraction": fraction, "text": text}
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, json.dumps(report).encode())
    finally:
        os.close(descriptor)
