"""Reads parsed TOML tables strictly: unknown keys are problems, reported with the nearest known key; all problems of
a file are found in one pass.
"""

from __future__ import annotations

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["ConfigError", "TableReader", "hint", "is_file", "is_json", "is_target", "parsed_toml"]

_TARGET: Final = re.compile(r"[^:]+:[A-Za-z_][A-Za-z0-9_.]*")
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KiB|MiB|GiB|TiB|kB|MB|GB|TB)")
_UNITS: Final[Mapping[str, int]] = {
    "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
MAX_INT64: Final = (1 << 63) - 1


class ConfigError(Exception):
    """Raised when a configuration or data file is invalid; `problems` has one line for each problem."""

    def __init__(self, summary: str, problems: Iterable[str]) -> None:
        """Stores the summary and the problems."""
        self.summary = summary
        self.problems = tuple(problems)
        super().__init__("\n".join([summary, *(f"  {problem}" for problem in self.problems)]))


class TableReader:
    """Reads the values of one table; invalid ones are added to `problems` and treated as missing."""

    def __init__(self, table: Mapping[str, Any], where: str, problems: list[str]) -> None:
        """Initializes the reader.

        Args:
            table: the table.
            where: its name, such as `agent.limits`; empty for the file itself.
            problems: list to which problems are added.
        """
        self._table = table
        self._where = where
        self._problems = problems

    def __contains__(self, key: str) -> bool:
        """Returns whether the table has a key."""
        return key in self._table

    def known(self, *keys: str) -> None:
        """Reports keys other than these."""
        for key in self._table:
            if key not in keys:
                self.problem(key, f"no such key{hint(key, keys)}")

    def problem(self, key: str, what: str) -> None:
        """Adds a problem of a key; an empty key means the table itself."""
        full = ".".join(part for part in (self._where, key) if part)
        self._problems.append(f"{full}: {what}" if full else what)

    def nested(self, table: Mapping[str, Any], where: str) -> TableReader:
        """Returns a reader of another table with the same list of problems."""
        return TableReader(table, where, self._problems)

    def table(self, key: str, *, required: bool = False) -> TableReader:
        """Reads a table in this table; empty if missing."""
        value = self._table.get(key)
        full = f"{self._where}.{key}" if self._where else key
        if isinstance(value, Mapping):
            return TableReader(value, full, self._problems)
        if required or value is not None:
            self._problems.append(f"{full}: must be a table [{full}]")
        return TableReader({}, full, self._problems)

    def text(self, key: str, *, required: bool = False) -> str:
        """Reads a non-empty text."""
        found = self._typed(key, lambda value: _is_text(value) and bool(value), "", "a text", required)
        return str(found)

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        """Reads one of several words; the first is the default."""
        word = self.text(key)
        if word and word not in choices:
            self.problem(key, f"must be one of {', '.join(filter(None, choices))}{hint(word, choices, list_all=False)}")
        return word if word in choices else choices[0]

    def words(self, key: str, example: str) -> tuple[str, ...]:
        """Reads a list of non-empty texts."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and bool(value) and all(map(_is_text, value))

        return tuple(self._typed(key, fits, (), f"a list of texts, such as {example}", required=False))

    def texts(self, key: str) -> dict[str, str]:
        """Reads a table of texts."""

        def fits(value: Any) -> bool:
            return isinstance(value, dict) and all(map(_is_text, (*value, *value.values())))

        return dict(self._typed(key, fits, {}, "a table of texts", required=False))

    def whole_number(self, key: str, *, least: int, most: int) -> int:
        """Reads an integer within a range; 0 if missing."""

        def fits(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most

        return int(self._typed(key, fits, 0, f"a whole number from {least} to {most}", required=False))

    def number(self, key: str) -> float | None:
        """Reads a finite number; None if missing."""

        def fits(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max

        found = self._typed(key, fits, None, "a number", required=False)
        return None if found is None else float(found)

    def flag(self, key: str) -> bool:
        """Reads true or false; false if missing."""
        return bool(self._typed(key, lambda value: isinstance(value, bool), False, "true or false", required=False))

    def tables(self, key: str) -> list[TableReader]:
        """Reads a list of tables."""

        def fits(value: Any) -> bool:
            return isinstance(value, list) and all(isinstance(each, Mapping) for each in value)

        full = f"{self._where}.{key}" if self._where else key
        found = self._typed(key, fits, [], f"a list of tables, [[{full}]]", required=False)
        return [TableReader(each, f"{full} {number}", self._problems) for number, each in enumerate(found, start=1)]

    def json(self, key: str) -> Mapping[str, Any] | str | None:
        """Reads a table of JSON values, or its JSON as a text; None if missing."""

        def fits(value: Any) -> bool:
            return isinstance(value, str) or (isinstance(value, Mapping) and is_json(value))

        found: Mapping[str, Any] | str | None = self._typed(
            key, fits, None, "a table of texts, numbers, booleans, lists and tables, or a text", required=False
        )
        return found

    def size(self, key: str) -> int:
        """Reads a size in bytes, as a number or with a unit, such as `"2GiB"`; 0 if missing."""
        value = self._table.get(key)
        if value is None:
            return 0
        size_bytes = _size_bytes(value)
        if not 0 < size_bytes <= MAX_INT64:
            self.problem(key, 'must be a size, such as "512MiB" or "2GiB", or a number of bytes')
            return 0
        return size_bytes

    def target(self, key: str, folder: Path) -> str:
        """Reads a Python target; a file that it names must be in `folder`."""
        target = self.text(key)
        if not target:
            return ""
        if not _TARGET.fullmatch(target):
            self.problem(key, f'write it as "file.py:name" or "package.module:name", not {target!r}')
            return target
        module = target.partition(":")[0]
        if module.endswith(".py") and not is_file(folder / module):
            self.problem(key, f"there is no file {folder / module}")
        return target

    def _typed(self, key: str, fits: Callable[[Any], bool], default: Any, what: str, required: bool) -> Any:
        if key not in self._table:
            if required:
                self.problem(key, f"is required: {what}")
            return default
        if not fits(self._table[key]):
            self.problem(key, f"must be {what}")
            return default
        return self._table[key]


def parsed_toml(path: Path, content: bytes | None = None) -> dict[str, Any]:
    """Returns the tables of a file.

    Args:
        path: the file.
        content: its content; None to read it.

    Raises:
        ConfigError: if it does not exist or is not TOML.
    """
    try:
        return tomllib.loads((path.read_bytes() if content is None else content).decode())
    except FileNotFoundError:
        raise ConfigError(f"File {path} does not exist.", ()) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder: name the file in it, such as {path / 'train.toml'}.", ()) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", ()) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8.", [f"see byte {error.start + 1}"]) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML.", [str(error)]) from None
    except ValueError:
        raise ConfigError(f"{path} is not valid TOML.", ["a number has too many digits"]) from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply.", ()) from None


def is_json(value: object) -> bool:
    """Returns whether JSON can represent a TOML value: a date cannot."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def hint(word: str, known: Iterable[str], *, list_all: bool = True) -> str:
    """Returns a suggestion: the nearest known word, or all of them."""
    choices = list(known)
    nearest = difflib.get_close_matches(word, choices, n=1)
    if nearest:
        return f"; did you mean {nearest[0]!r}?"
    return f"; known: {', '.join(choices)}" if choices and list_all else ""


def is_target(text: str) -> bool:
    """Returns whether a text has the form of a Python target, `file.py:name` or `package.module:name`."""
    return _TARGET.fullmatch(text) is not None and " " not in text


def is_file(path: Path, *, folder: bool = False) -> bool:
    """Returns whether a path is an existing file or folder; False also for an impossible path."""
    try:
        return path.is_dir() if folder else path.is_file()
    except (OSError, ValueError):
        return False


def _is_text(value: object) -> bool:
    """Returns whether a value is a text that can name a file, be an argument or a variable: one without NUL."""
    return isinstance(value, str) and "\0" not in value


def _size_bytes(value: object) -> int:
    """Parses a size; 0 if malformed."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    parts = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    return int(float(parts[1]) * _UNITS[parts[2]]) if parts else 0
