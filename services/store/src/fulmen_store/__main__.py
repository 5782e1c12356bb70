"""`python -m fulmen_store serve|migrate|config`."""

from __future__ import annotations

import asyncio

import typer

from fulmen.errors import FulmenError
from fulmen_service_kit.cli import fail, load_settings, service_cli
from fulmen_store.app import build
from fulmen_store.persistence.migrations import migrate
from fulmen_store.settings import StoreSettings

main = service_cli(StoreSettings, build)


@main.command(name="migrate")
def migrate_command() -> None:
    """Brings the database's schema up to date and ends."""
    settings = load_settings(StoreSettings)
    assert isinstance(settings, StoreSettings)
    try:
        applied = asyncio.run(migrate(settings.database_url.get_secret_value()))
    except FulmenError as error:
        fail(str(error))
    for name in applied:
        typer.echo(f"applied {name}")
    typer.echo("The schema is up to date.")


if __name__ == "__main__":
    main()
