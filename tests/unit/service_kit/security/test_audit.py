"""The audit log: every administrative call, and few lines of calls that may be made without end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fulmen_service_kit.security import audit
from fulmen_service_kit.security.audit import AuditLog
from fulmen_service_kit.security.tokens import Caller, Role

ANN, BOB = (Caller(role=Role.CLIENT, project=f"projects/{name}") for name in ("ann", "bob"))


@pytest.mark.parametrize(
    ("code", "lines"), [("OK", 5), ("PERMISSION_DENIED", 5), ("RESOURCE_EXHAUSTED", 1), ("UNAUTHENTICATED", 1)]
)
def test_calls_over_a_limit_or_without_a_token_have_few_lines(tmp_path: Path, code: str, lines: int) -> None:
    log = AuditLog(str(tmp_path / "audit.log"))
    for caller in (*[ANN] * 5, BOB):
        log(rpc="/x.Service/Set", code=code, reason="", caller=caller, asked={})
    written = [json.loads(line)["project"] for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert written == [ANN.project] * lines + [BOB.project]


def test_the_next_line_says_how_many_were_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(audit.time, "monotonic", lambda: now_s)
    log = AuditLog(str(tmp_path / "audit.log"))
    for now_s in (0.0, 1.0, 2.0, audit.SPARSE_S + 1, 3 * audit.SPARSE_S):  # noqa: B007  # read by the clock
        log(rpc="/x.Service/Set", code="RESOURCE_EXHAUSTED", reason="", caller=ANN, asked={})
    written = [json.loads(line).get("left_out", 0) for line in (tmp_path / "audit.log").read_text().splitlines()]
    assert written == [0, 2, 0]
