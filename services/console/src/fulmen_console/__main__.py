"""`python -m fulmen_console serve|config`."""

from __future__ import annotations

from fulmen_console.app import build
from fulmen_console.settings import ConsoleSettings
from fulmen_service_kit.cli import service_cli

main = service_cli(ConsoleSettings, build)

if __name__ == "__main__":
    main()
