"""A log that cannot be written stops no work: /dev/full refuses every byte, as a full disk does."""

import subprocess
import sys
from pathlib import Path

import pytest

LOGS = """
import logging, sys, structlog
from fulmen_service_kit.observability.logs import configure_logs
from fulmen_service_kit.security.audit import AuditLog

configure_logs(service="tests", log_format=sys.argv[1], level="info")
structlog.get_logger().warning("a_line", text="x" * 20_000)
logging.getLogger("elsewhere").warning("a line of a library")
AuditLog()(rpc="/a.B/C", code="OK", reason="", caller=None, asked={})
sys.stderr.write("by hand")
sys.stderr.flush()
"""
FULL = LOGS + "sys.stdout.write(str(sys.stderr.lost))"
AGAIN = LOGS + "import os; os.dup2(os.open(sys.argv[2], os.O_WRONLY), 2); structlog.get_logger().info('room_again')"
pytestmark = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")


def run(script: str, *arguments: str, is_full: bool = False) -> subprocess.CompletedProcess[str]:
    """Runs a script whose standard error, and if asked its standard output, is full."""
    with Path("/dev/full").open("wb") as full:
        return subprocess.run(
            [sys.executable, "-c", script, *arguments], stdout=full if is_full else subprocess.PIPE, stderr=full,
            check=False, text=True, timeout=60,
        )  # fmt: skip


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_lines_that_a_full_disk_refuses_are_lost_and_counted(log_format: str) -> None:
    assert int(run(FULL, log_format).stdout or -1) >= 3


def test_lines_are_written_again_once_there_is_room(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    run(AGAIN, "json", str(log))
    assert "room_again" in log.read_text()


def test_an_agent_in_the_process_may_print() -> None:
    assert run(LOGS + "print('said', flush=True)", "json", is_full=True).returncode == 0
