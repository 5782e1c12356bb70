"""The audit log of administrative calls: caller, request and result.

One JSON object per line, independent of the log level, to a file or to standard error with `"event": "audit"`. Rejected
calls are included; of those over a limit, and of those without a valid token, one per rpc and project in ten seconds, with
the number of those that were left out since. Only fields named by the policy are written, so that no secret appears.
"""

import datetime
import json
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import structlog
from opentelemetry import metrics, trace

from fulmen_service_kit.security.tokens import Caller

_MAX_TEXT = 256
_MAX_LISTED = 64
_REFUSED = frozenset({"PERMISSION_DENIED", "UNAUTHENTICATED"})
_SPARSE = frozenset({"RESOURCE_EXHAUSTED", "UNAUTHENTICATED"})
SPARSE_S = 10.0
"""Time between two lines of an rpc and project for calls that may be made without end: over a limit, or without a token."""
_MAX_SPARSE = 10_000

Sink = Callable[[Mapping[str, Any]], None]
"""Takes the fields of a line."""

_log = structlog.get_logger()


class AuditLog:
    """Writes audit lines. Thread-safe."""

    def __init__(
        self, path: str = "", *, service: str = "", rpcs: Iterable[str] = (), also: Sink | None = None
    ) -> None:
        """Opens the file for appending, readable by its owner only.

        Args:
            path: The file; empty for standard error.
            service: Name of the service.
            rpcs: Full names of the audited rpcs, whose counters start at 0.
            also: Called with every line; must not block or raise.

        Raises:
            OSError: If the file cannot be opened.
        """
        self._service = service
        self._also = also
        self._lock = threading.Lock()
        # Time of the next line, and the number left out since the last one.
        self._sparse: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()
        self._calls = metrics.get_meter("fulmen.audit").create_counter(
            "fulmen.audit.calls", description="Administrative calls by rpc and result: ok, refused or failed."
        )
        for rpc in rpcs:
            for result in ("ok", "refused", "failed"):
                self._calls.add(0, {"rpc": _short(rpc), "result": result})
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path else None

    def __call__(self, *, rpc: str, code: str, reason: str, caller: Caller | None, asked: dict[str, Any]) -> None:
        """Writes one line; if the file cannot be written, logs an error and writes to standard error.

        Args:
            rpc: Full name of the rpc.
            code: OK or the canonical error code.
            reason: Reason of the error.
            caller: The caller; None if unknown.
            asked: Fields of the request.
        """
        result = "ok" if code == "OK" else "refused" if code in _REFUSED else "failed"
        self._calls.add(1, {"rpc": _short(rpc), "result": result})
        left_out = self._left_out(rpc, "" if caller is None else caller.project) if code in _SPARSE else 0
        if left_out is None:
            return
        context = trace.get_current_span().get_span_context()
        line: dict[str, Any] = {
            "event": "audit",
            "timestamp": datetime.datetime.now(datetime.UTC).isoformat(),
            "service": self._service,
            "rpc": rpc,
            "code": code,
            "reason": reason,
            "role": "" if caller is None else str(caller.role),
            "subject": "" if caller is None else caller.subject,
            "project": "" if caller is None else caller.project,
            "token_id": "" if caller is None else caller.token_id,
            "asked": asked,
            "trace_id": f"{context.trace_id:032x}" if context.is_valid else "",
        }
        if left_out:
            line["left_out"] = left_out
        if self._also is not None:
            self._also(line)
        payload = json.dumps(line, separators=(",", ":"), default=str) + "\n"
        with self._lock:
            if self._descriptor is not None:
                try:
                    os.write(self._descriptor, payload.encode())
                except OSError as error:
                    _log.error("audit_file_not_written", reason=error.strerror)
                else:
                    return
            sys.stderr.write(payload)

    def _left_out(self, rpc: str, project: str) -> int | None:
        """Returns the number of calls without a line since the last one; None if this one gets none either."""
        now_s, key = time.monotonic(), (rpc, project)
        with self._lock:
            next_s, count = self._sparse.pop(key, (now_s, 0))
            is_due = now_s >= next_s
            self._sparse[key] = (now_s + SPARSE_S, 0) if is_due else (next_s, count + 1)
            if len(self._sparse) > _MAX_SPARSE:
                self._sparse.popitem(last=False)
        return count if is_due else None


def _short(rpc: str) -> str:
    """Returns `ProjectService/IssueToken` of an rpc's full name."""
    return rpc.rpartition(".")[2]


def fields_of(request: Any, paths: Sequence[str]) -> dict[str, Any]:
    """Returns fields of a message by path: enums by name, long strings truncated, empty fields omitted.

    A repeated field, and a path such as `resources.kind` that leads through one, is a list of at most 64 values.
    """
    found: dict[str, Any] = {}
    for path in paths:
        message = request
        *outer, last = path.split(".")
        for name in outer:
            message = getattr(message, name, None)
        if isinstance(message, Sequence):
            found[path] = [str(getattr(each, last))[:_MAX_TEXT] for each in message[:_MAX_LISTED]]
            continue
        value = getattr(message, last, None)
        if value is None or value == "":
            continue
        descriptor = message.DESCRIPTOR.fields_by_name[last]
        if descriptor.enum_type is not None and isinstance(value, int):
            number = descriptor.enum_type.values_by_number.get(value)
            value = value if number is None else number.name
        elif isinstance(value, str):
            value = value[:_MAX_TEXT]
        elif isinstance(value, Sequence) and not isinstance(value, bytes):
            value = [str(each)[:_MAX_TEXT] for each in value[:_MAX_LISTED]]
        elif not isinstance(value, int | float | bool):
            value = str(value)[:_MAX_TEXT]
        found[path] = value
    return found
