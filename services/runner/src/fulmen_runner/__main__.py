"""`python -m fulmen_runner serve | config`."""

from fulmen_runner.app import build
from fulmen_runner.secrecy import hide_process
from fulmen_runner.settings import RunnerSettings
from fulmen_service_kit.cli import service_cli
from fulmen_service_kit.lifecycle import Build, run_service
from fulmen_service_kit.settings import ServiceSettings


def main() -> None:
    """Runs the command line."""
    service_cli(RunnerSettings, build, run=_run)()


async def _run(settings: ServiceSettings, build: Build) -> int:
    hide_process()
    return await run_service(settings, build)


if __name__ == "__main__":
    main()
