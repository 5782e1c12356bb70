"""The audit log: who asked for what, of calls that change how a deployment works, and what came of it.

One JSON object a line, whatever the log level; to a file of its own, or to standard error among the other lines, with
`"event": "audit"`. A call that is refused is there, too. Never a secret: only fields that the policy names are written.
"""

import datetime
import json
import os
import sys
import threading
from collections.abc import Sequence
from typing import Any

import structlog
from opentelemetry import trace

from fulmen_service_kit.tokens import Caller

_MAX_TEXT = 256

_log = structlog.get_logger()


class AuditLog:
    """Writes the lines; safe from several threads."""

    def __init__(self, path: str = "", *, service: str = "") -> None:
        """Opens the file for appending, readable by its owner only; empty: standard error.

        Raises:
            OSError: if it cannot be opened.
        """
        self._service = service
        self._lock = threading.Lock()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) if path else None

    def __call__(self, *, rpc: str, code: str, reason: str, caller: Caller | None, asked: dict[str, Any]) -> None:
        """Writes one line. If the file takes none, that is logged, and the line goes to standard error: what it tells of is done.

        Args:
            rpc: Full name of what was called.
            code: How it ended, OK or a canonical code.
            reason: Fulmen's own reason, of an error.
            caller: Who called; None if that is not known.
            asked: The fields of the request.
        """
        context = trace.get_current_span().get_span_context()
        line = {
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


def fields_of(request: Any, paths: Sequence[str]) -> dict[str, Any]:
    """Returns fields of a message by their paths; enumerations by name, long texts cut, those that are not there left out."""
    found: dict[str, Any] = {}
    for path in paths:
        message = request
        *outer, last = path.split(".")
        for name in outer:
            message = getattr(message, name, None)
        value = getattr(message, last, None)
        if value is None or value == "":
            continue
        descriptor = message.DESCRIPTOR.fields_by_name[last]
        if descriptor.enum_type is not None and isinstance(value, int):
            number = descriptor.enum_type.values_by_number.get(value)
            value = value if number is None else number.name
        elif isinstance(value, str):
            value = value[:_MAX_TEXT]
        elif not isinstance(value, int | float | bool):
            value = [str(each)[:_MAX_TEXT] for each in value] if hasattr(value, "__iter__") else str(value)[:_MAX_TEXT]
        found[path] = value
    return found
