"""The command line of a service: `serve`, `config`, and commands that the service adds."""

import sys
from collections.abc import Callable, Coroutine
from typing import NoReturn

import typer
import uvloop

from fulmen.errors import FulmenError
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.isolation.hiding import forget_variables, hide_process
from fulmen_service_kit.lifecycle import Build, run_service
from fulmen_service_kit.observability.logs import configure_logs
from fulmen_service_kit.settings import ServiceSettings

Run = Callable[[ServiceSettings, Build], Coroutine[None, None, int]]


def service_cli(settings_class: type[ServiceSettings], build: Build, *, run: Run = run_service) -> typer.Typer:
    """Returns the command line of a service.

    Args:
        settings_class: Settings, read from the environment.
        build: Composition root of the service.
        run: Runs the service; replaced by a service with several processes.
    """
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.command()
    def serve() -> None:
        """Runs the service until SIGTERM or Ctrl-C."""
        settings = load_settings(settings_class)
        # Code of tenants may run as this user, and services keep secrets in memory.
        hide_process()
        forget_variables(settings.secret_variables)
        configure_logs(service=settings.service_name, log_format=settings.log_format, level=settings.log_level)
        try:
            status = uvloop.run(run(settings, build))
        except (StartupError, FulmenError) as error:
            fail(str(error))
        sys.exit(status)

    @app.command()
    def config() -> None:
        """Prints the resolved settings, secrets masked."""
        for name, value in load_settings(settings_class).describe().items():
            typer.echo(f"{name}={value}")

    return app


def load_settings(settings_class: type[ServiceSettings]) -> ServiceSettings:
    """Reads the settings; on error, prints all problems and exits with status 2."""
    try:
        return settings_class.from_environment()
    except FulmenError as error:
        fail(str(error), status=2)


def fail(message: str, *, status: int = 1) -> NoReturn:
    """Prints an error and exits."""
    typer.echo(f"error: {message}", err=True)
    sys.exit(status)


__all__ = ["fail", "load_settings", "service_cli"]
