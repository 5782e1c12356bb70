"""`python -m fulmen_runner serve | config`."""

from fulmen_service_kit.importing import without_collector

with without_collector():
    from fulmen_runner.app import build
    from fulmen_runner.settings import RunnerSettings
    from fulmen_service_kit.cli import service_cli

main = service_cli(RunnerSettings, build)

if __name__ == "__main__":
    main()
