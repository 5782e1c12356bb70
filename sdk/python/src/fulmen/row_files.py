"""Files of rows: JSON lines, or Parquet with the extra `fulmen[export]`.

Invariants: a file is complete or absent, since it is first written under another name; at most one row group is in
memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Protocol, assert_never

__all__ = ["Column", "ExtraMissing", "FileFormat", "Row", "RowWriter", "writing", "writing_jsonl", "writing_parquet"]

ROWS_PER_GROUP: Final = 4096
BYTES_PER_GROUP: Final = 32 * 1024 * 1024
_ENTRY_BYTES: Final = 8

Row = dict[str, Any]


class FileFormat(StrEnum):
    """Format of a file."""

    JSONL = "jsonl"
    PARQUET = "parquet"


class Column(StrEnum):
    """Type of a Parquet column, always nullable. NESTED is any JSON value, as text."""

    TEXT = "text"
    NESTED = "nested"
    BOOL = "bool"
    INT32 = "int32"
    INT64 = "int64"
    UINT64 = "uint64"
    FLOAT64 = "float64"
    BOOLS = "list<bool>"
    INT32S = "list<int32>"
    INT64S = "list<int64>"
    FLOAT32S = "list<float32>"
    TEXTS = "list<text>"


class ExtraMissing(Exception):
    """A library of an extra is not installed; the text names the extra."""


class RowWriter(Protocol):
    """A writer of rows."""

    def write(self, row: Row) -> None:
        """Writes a row."""
        ...


def writing(file_format: FileFormat, path: Path, columns: Mapping[str, Column]) -> AbstractContextManager[RowWriter]:
    """Opens a file of the given format; see `writing_jsonl` and `writing_parquet`."""
    match file_format:
        case FileFormat.JSONL:
            return writing_jsonl(path)
        case FileFormat.PARQUET:
            return writing_parquet(path, columns)
        case _:
            assert_never(file_format)


@contextmanager
def writing_jsonl(path: Path) -> Iterator[RowWriter]:
    """Opens a file of one JSON object per line; it gets its name when the block ends without an error."""
    with _under_another_name(path) as temporary, temporary.open("w", encoding="utf-8") as file:

        class Lines:
            def write(self, row: Row) -> None:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

        yield Lines()


@contextmanager
def writing_parquet(path: Path, columns: Mapping[str, Column]) -> Iterator[RowWriter]:
    """Opens a Parquet file with these columns; it gets its name when the block ends without an error.

    Raises:
        ExtraMissing: if pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ExtraMissing('Parquet needs pyarrow: pip install "fulmen[export]", or choose --format jsonl.') from None
    kinds = {
        Column.TEXT: pa.string(),
        Column.NESTED: pa.string(),
        Column.BOOL: pa.bool_(),
        Column.INT32: pa.int32(),
        Column.INT64: pa.int64(),
        Column.UINT64: pa.uint64(),
        Column.FLOAT64: pa.float64(),
        Column.BOOLS: pa.list_(pa.bool_()),
        Column.INT32S: pa.list_(pa.int32()),
        Column.INT64S: pa.list_(pa.int64()),
        Column.FLOAT32S: pa.list_(pa.float32()),
        Column.TEXTS: pa.list_(pa.string()),
    }
    schema = pa.schema([(name, kinds[column]) for name, column in columns.items()])
    with _under_another_name(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as file:
        groups = _Groups(lambda rows: file.write_table(pa.Table.from_pylist(rows, schema=schema)), columns)
        yield groups
        groups.flush()


class _Groups:
    """Buffers rows up to a row group."""

    def __init__(self, write_group: Any, columns: Mapping[str, Column]) -> None:
        self._write_group = write_group
        self._nested = frozenset(name for name, column in columns.items() if column is Column.NESTED)
        self._rows: list[Row] = []
        self._size_bytes = 0

    def write(self, row: Row) -> None:
        flat = {
            name: json.dumps(value, ensure_ascii=False) if name in self._nested and value is not None else value
            for name, value in row.items()
        }
        self._rows.append(flat)
        self._size_bytes += sum(map(_size_bytes, flat.values()))
        if len(self._rows) >= ROWS_PER_GROUP or self._size_bytes >= BYTES_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._write_group(self._rows)
        self._rows, self._size_bytes = [], 0


def _size_bytes(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    return _ENTRY_BYTES * len(value) if isinstance(value, list | tuple) else _ENTRY_BYTES


@contextmanager
def _under_another_name(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
