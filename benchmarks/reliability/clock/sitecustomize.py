"""Gives each Python process of a stack a clock of its own, that the crash matrix can set: `CRASH_MATRIX_CLOCKS` names a folder.

On PYTHONPATH, so it runs before a service does. The service executes itself again with libfaketime, which reads the offset from
the file of its name; the process keeps its id. The variable is not FULMEN_…: of those a stack passes on the services' own alone.
"""

import os
import select
import sys
import time

LIBRARY = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
NAMES = {
    "fulmen_store": "store",
    "fulmen_llm_proxy": "llm_proxy",
    "fulmen_runner": "runner",
    "fulmen_algorithm": "algorithm",
    "fulmen_algorithm.engines.embedded": "engine",
    # PostgreSQL is its child, and inherits its clock.
    "fulmen_cli.local.supervisor": "supervisor",
}


def _own_clock() -> None:
    folder = os.environ.get("CRASH_MATRIX_CLOCKS", "")
    arguments = sys.orig_argv
    module = arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else ""
    name = NAMES.get(module)
    if not folder or name is None:
        return
    port = os.environ.get("FULMEN_RUNNER_PORT", "") if name == "runner" else ""
    file = os.path.join(folder, name + (f"-{port}" if port else ""))  # noqa: PTH118  # Before anything is imported.
    if os.environ.get("FAKETIME_TIMESTAMP_FILE") == file:
        return
    if not os.path.exists(file):  # noqa: PTH110  # As above.
        with open(file, "w", encoding="utf-8") as clock:  # noqa: PTH123  # As above.
            clock.write("+0")
    os.environ |= {
        "LD_PRELOAD": LIBRARY,
        "FAKETIME_TIMESTAMP_FILE": file,
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    os.execv(sys.executable, [sys.executable, *arguments[1:]])  # No shell is wanted.


if "faketime" in os.environ.get("LD_PRELOAD", ""):
    # libfaketime 0.9.10 makes an invalid call of clock_nanosleep(2) with a deadline, which time.sleep makes.
    time.sleep = lambda seconds: select.select([], [], [], float(seconds)) and None
_own_clock()
