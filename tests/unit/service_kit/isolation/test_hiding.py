"""What a service holds is not readable by other processes of its user."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import ctypes, subprocess, sys
from fulmen_service_kit.isolation.hiding import hide_process
dumpable = "import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), flush=True)"
exec(dumpable)
hide_process()
exec(dumpable)
subprocess.run([sys.executable, "-c", dumpable], check=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")
def test_a_hidden_process_is_not_dumpable_and_what_it_starts_is() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.split() == ["1", "0", "1"]
