"""Tasks from where people keep them: Python values, pandas, `datasets`, and files of JSON lines, CSV or Parquet."""

from __future__ import annotations

import csv
import datetime
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias

from fulmen.row_files import ExtraMissing
from fulmen.train_toml.train import ConfigError

__all__ = ["Tasks", "task_lines"]

Tasks: TypeAlias = str | PathLike[str] | Mapping[str, Any] | Iterable[Mapping[str, Any]]
"""A path (.jsonl, .csv, .parquet), one task, several tasks, a `pandas.DataFrame` or a `datasets.Dataset`."""


def task_lines(tasks: Any, where: str) -> list[bytes]:
    """Returns one line of JSON for each task, ended by a newline; a file's blank lines are left out.

    NaN becomes null, times become ISO 8601, and numpy arrays become lists. Cells of CSV are texts.

    Args:
        tasks: see `Tasks`.
        where: what they are for, in errors.

    Raises:
        ConfigError: if they have another type, or a value cannot be converted to JSON.
        ExtraMissing: if the library that reads the file is not installed.
        OSError: if the file cannot be read.
    """
    if isinstance(tasks, str | PathLike):
        path = Path(tasks)
        if path.suffix in _LINES:
            return [stripped + b"\n" for line in path.read_bytes().split(b"\n") if (stripped := line.strip())]
        if path.suffix not in _READERS:
            known = ", ".join([*_LINES, *_READERS])
            raise ConfigError(f"{where}: {path} has none of the known suffixes {known}.", ())
        return _encoded(_READERS[path.suffix](path), where)
    return _encoded(_rows(tasks, where), where)


def _rows(tasks: Any, where: str) -> Iterable[Any]:
    if isinstance(tasks, Mapping):
        return [tasks]
    if type(tasks).__module__.partition(".")[0] == "pandas" and hasattr(tasks, "to_dict"):
        rows: list[Any] = tasks.to_dict("records")
        return rows
    # A `datasets.Dataset` yields dictionaries.
    if isinstance(tasks, Iterable) and not isinstance(tasks, bytes):
        return tasks
    raise ConfigError(f"{where}: {type(tasks).__name__} is not a list of tasks, data frame, data set or path.", ())


def _encoded(rows: Iterable[Any], where: str) -> list[bytes]:
    lines, problems = [], []
    for number, row in enumerate(rows, start=1):
        try:
            if not isinstance(row, Mapping):
                raise TypeError(f"must be a dict, not {type(row).__name__}")
            lines.append(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False).encode() + b"\n")
        except (TypeError, ValueError) as error:
            problems.append(f"{where}[{number - 1}]: {error}")
    if problems:
        raise ConfigError(f"{where}: {len(problems)} tasks cannot be converted to JSON; nothing was created.", problems)
    return lines


def _plain(value: Any) -> Any:
    """Returns a value in JSON's types."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case list() | tuple() | set():
            return [_plain(item) for item in value]
        case datetime.date() | datetime.time():
            # pandas has a time of its own that is none.
            return value.isoformat() if value == value else None
    for method in ("tolist", "item"):  # arrays and numbers of numpy
        if hasattr(value, method):
            return _plain(getattr(value, method)())
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")


def _csv(path: Path) -> Iterator[dict[str, Any]]:
    return csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""))


def _parquet(path: Path) -> list[Any]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ExtraMissing('Parquet needs pyarrow: pip install "fulmen[export]".') from None
    rows: list[Any] = parquet.read_table(path).to_pylist()
    return rows


_LINES: Final = (".jsonl", ".ndjson")
_READERS: Final[Mapping[str, Callable[[Path], Iterable[Any]]]] = {".csv": _csv, ".parquet": _parquet}
