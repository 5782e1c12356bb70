"""Spans as rows of a file: JSON lines, or Parquet by the extra `fulmen[export]`.

Invariants: a file is complete or is not there, since it is written under another name first; what is held in memory
is one group of rows, however many there are; a span that was stored twice is written once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

import zstandard
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.store.v1 import span_pb2
from fulmen.trajectories import MAX_BATCH_BYTES
from fulmen.type.v1 import model_call_pb2

__all__ = ["ExtraMissing", "RowWriter", "SpanRows", "writing_jsonl", "writing_parquet"]

ROWS_PER_GROUP: Final = 4096
BYTES_PER_GROUP: Final = 32 * 1024 * 1024

Row = dict[str, Any]


class ExtraMissing(Exception):
    """A library that comes with an extra is not installed; the text says how to install it."""


class RowWriter(Protocol):
    """Takes rows."""

    def write(self, row: Row) -> None:
        """Takes one row."""
        ...


class SpanRows:
    """Turns chunks into rows; the chunks of a rollout must come together, as the store sends them.

    Attributes:
        duplicates: how many spans came again.
        unreadable: how many chunks could not be unpacked.
    """

    def __init__(self) -> None:
        """Begins with nothing seen."""
        self.duplicates = 0
        self.unreadable = 0
        self._rollout = ""
        self._seen: set[tuple[str, bytes]] = set()

    def of(self, chunk: span_pb2.SpanChunk) -> Iterator[Row]:
        """Yields the spans of a chunk that did not come before."""
        rollout = chunk.attempt.rpartition("/attempts/")[0]
        if rollout != self._rollout:
            self._rollout, self._seen = rollout, set()
        try:
            batch = _unpacked(chunk)
            parsed = [(record, trace_pb2.Span.FromString(record.otlp_span)) for record in batch.spans]
        except (DecodeError, zstandard.ZstdError):
            self.unreadable += 1
            return
        for record, span in parsed:
            key = chunk.attempt, span.span_id
            if key in self._seen:
                self.duplicates += 1
                continue
            self._seen.add(key)
            yield _row(chunk.attempt, record, span)


@contextmanager
def writing_jsonl(path: Path) -> Iterator[RowWriter]:
    """Opens a file of one JSON object per line; it has its name when the block ends without an error."""
    with _under_another_name(path) as temporary, temporary.open("w", encoding="utf-8") as file:

        class Lines:
            def write(self, row: Row) -> None:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

        yield Lines()


@contextmanager
def writing_parquet(path: Path) -> Iterator[RowWriter]:
    """Opens a Parquet file whose nested columns are JSON texts; it has its name when the block ends without an error.

    Raises:
        ExtraMissing: if pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ExtraMissing('Parquet needs pyarrow: pip install "fulmen[export]", or choose --format jsonl.') from None
    kinds = {"start_time_unix_nano": pa.uint64(), "end_time_unix_nano": pa.uint64(), "attempt": pa.int32()}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in _COLUMNS])
    with _under_another_name(path) as temporary, pq.ParquetWriter(temporary, schema, compression="zstd") as file:
        groups = _Groups(lambda rows: file.write_table(pa.Table.from_pylist(rows, schema=schema)))
        yield groups
        groups.flush()


class _Groups:
    """Collects rows until they make a row group."""

    def __init__(self, write_group: Any) -> None:
        self._write_group = write_group
        self._rows: list[Row] = []
        self._size_bytes = 0

    def write(self, row: Row) -> None:
        flat = {name: json.dumps(value) if isinstance(value, dict | list) else value for name, value in row.items()}
        self._rows.append(flat)
        self._size_bytes += sum(len(value) for value in flat.values() if isinstance(value, str))
        if len(self._rows) >= ROWS_PER_GROUP or self._size_bytes >= BYTES_PER_GROUP:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._write_group(self._rows)
        self._rows, self._size_bytes = [], 0


_COLUMNS: Final = (
    "rollout", "attempt", "trace_id", "span_id", "parent_span_id", "name", "kind", "start_time_unix_nano",
    "end_time_unix_nano", "status", "status_message", "scope", "attributes", "events", "links", "resource",
    "model_call",
)  # fmt: skip


def _row(attempt: str, record: span_pb2.SpanRecord, span: trace_pb2.Span) -> Row:
    rollout, _, number = attempt.rpartition("/attempts/")
    resource = resource_pb2.Resource.FromString(record.otlp_resource)
    call = model_call_pb2.ModelCallRecord.FromString(record.model_call) if record.model_call else None
    return {
        "rollout": rollout,
        "attempt": int(number),
        "trace_id": span.trace_id.hex(),
        "span_id": span.span_id.hex(),
        "parent_span_id": span.parent_span_id.hex(),
        "name": span.name,
        "kind": _word(trace_pb2.Span.SpanKind.Name, span.kind, "SPAN_KIND_"),
        "start_time_unix_nano": span.start_time_unix_nano,
        "end_time_unix_nano": span.end_time_unix_nano,
        "status": _word(trace_pb2.Status.StatusCode.Name, span.status.code, "STATUS_CODE_"),
        "status_message": span.status.message,
        "scope": record.scope,
        "attributes": {pair.key: _value(pair.value) for pair in span.attributes},
        "events": [
            {
                "name": event.name,
                "time_unix_nano": event.time_unix_nano,
                "attributes": {pair.key: _value(pair.value) for pair in event.attributes},
            }
            for event in span.events
        ],
        "links": [{"trace_id": link.trace_id.hex(), "span_id": link.span_id.hex()} for link in span.links],
        "resource": {pair.key: _value(pair.value) for pair in resource.attributes},
        "model_call": None if call is None else MessageToDict(call, preserving_proto_field_name=True),
    }


def _value(value: Any) -> Any:
    """Returns an OTLP value as JSON: lists and maps as such, bytes in hexadecimal."""
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return [_value(each) for each in value.array_value.values]
        case "kvlist_value":
            return {pair.key: _value(pair.value) for pair in value.kvlist_value.values}
        case "bytes_value":
            return value.bytes_value.hex()
        case kind:
            return getattr(value, kind)


def _word(name_of: Any, number: int, prefix: str) -> str:
    try:
        return str(name_of(number)).removeprefix(prefix).lower()
    except ValueError:
        return str(number)


def _unpacked(chunk: span_pb2.SpanChunk) -> span_pb2.SpanBatch:
    payload = chunk.payload
    if chunk.codec == span_pb2.SPAN_CODEC_ZSTD:
        if not 0 <= zstandard.frame_content_size(payload) <= MAX_BATCH_BYTES:
            raise zstandard.ZstdError("the frame is too large or does not tell its size")
        payload = zstandard.ZstdDecompressor().decompress(payload, max_output_size=MAX_BATCH_BYTES)
    return span_pb2.SpanBatch.FromString(payload)


@contextmanager
def _under_another_name(path: Path) -> Iterator[Path]:
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
