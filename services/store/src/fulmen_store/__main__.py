"""`python -m fulmen_store serve|migrate|config`."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fulmen_service_kit.importing import without_collector

with without_collector():
    import typer

    from fulmen.errors import FulmenError
    from fulmen_service_kit.cli import fail, load_settings, service_cli
    from fulmen_store.app import build
    from fulmen_store.database.migrations import migrate
    from fulmen_store.settings import StoreSettings

Post = Annotated[
    bool,
    typer.Option(
        "--post", help="Also removes what only the previous release needs: no store of that release may be running."
    ),
]

main = service_cli(StoreSettings, build)


@main.command(name="migrate")
def migrate_command(*, post: Post = False) -> None:
    """Brings the database's schema up to date and exits. The previous release works on the new schema until `--post`."""
    settings = load_settings(StoreSettings)
    assert isinstance(settings, StoreSettings)
    try:
        migrated = asyncio.run(
            migrate(settings.database_url.get_secret_value(), with_post=post, on_progress=_caught_up)
        )
    except FulmenError as error:
        fail(str(error))
    for name in migrated.applied:
        typer.echo(f"applied {name}")
    for name in migrated.waiting:
        typer.echo(f"pending until --post: {name}")
    typer.echo("The schema is up to date.")


def _caught_up(taken: int, missing: int) -> None:
    typer.echo(f"advancing the transaction counter after a restore: {taken:,} of {missing:,}")


if __name__ == "__main__":
    main()
