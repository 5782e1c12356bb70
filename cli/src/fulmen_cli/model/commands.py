"""`fulmen model`: plan, list, serve, export, merge, push, upload and download models."""

from __future__ import annotations

import typer

from fulmen_cli.command import local_command, new_group, remote_command
from fulmen_cli.model import transfer
from fulmen_cli.model.export import export, merge_lora
from fulmen_cli.model.listing import list_models
from fulmen_cli.model.plan import plan
from fulmen_cli.model.serve import serve

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    model = new_group("Models: plan memory, list trained versions, serve, export, upload and download.")
    app.add_typer(model, name="model")
    local_command(model, "plan")(plan)
    remote_command(model, "list")(list_models)
    remote_command(model, "serve")(serve)
    remote_command(model, "export")(export)
    remote_command(model, "merge-lora")(merge_lora)
    local_command(model, "push")(transfer.push)
    remote_command(model, "upload")(transfer.upload)
    remote_command(model, "uploaded")(transfer.uploaded)
    remote_command(model, "download")(transfer.download)
    remote_command(model, "delete")(transfer.delete)
