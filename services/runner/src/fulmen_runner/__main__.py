"""`python -m fulmen_runner serve | config`."""

import ctypes
import sys

from fulmen_runner.app import build
from fulmen_runner.settings import RunnerSettings
from fulmen_service_kit.cli import service_cli
from fulmen_service_kit.lifecycle import Build, run_service
from fulmen_service_kit.settings import ServiceSettings

_PR_SET_DUMPABLE = 4


def main() -> None:
    """Runs the command line."""
    service_cli(RunnerSettings, build, run=_run)()


async def _run(settings: ServiceSettings, build: Build) -> int:
    hide_process()
    return await run_service(settings, build)


def hide_process() -> None:
    """Makes this process's environment and memory unreadable for its user, and disables core dumps. Linux only.

    Commands run as the same user and must not read the runner's token (prctl(2), PR_SET_DUMPABLE; proc_pid_environ(5)).
    This does not protect against root or against Python agents inside the runner. Processes that it starts do not
    inherit it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


if __name__ == "__main__":
    main()
