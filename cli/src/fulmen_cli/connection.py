"""Where the services are and who calls: from options, then the environment, then the stack of the state folder."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer

from fulmen.connection import DEFAULT_STATE_DIR, Deployment, LocalStackMissing, TokenUnreadable
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.rpc.services import Services, Targets, connect
from fulmen.rpc.tls import CA_VARIABLE, TlsFiles, TlsWatch
from fulmen_cli.exits import CommandFailed, Exit

__all__ = ["Connection"]


_PANEL: Final = "Where to connect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The options of every command that calls a service; unset ones come from the running stack."""

    state_dir: Annotated[
        Path,
        typer.Option(
            "--state-dir", envvar="FULMEN_STATE_DIR", rich_help_panel=_PANEL, help="State directory of the local stack."
        ),
    ] = DEFAULT_STATE_DIR
    store_target: Annotated[
        str | None,
        typer.Option(
            "--store-target", envvar="FULMEN_STORE_TARGET", rich_help_panel=_PANEL, help="The store, HOST:PORT."
        ),
    ] = None
    algorithm_target: Annotated[
        str | None,
        typer.Option(
            "--algorithm-target",
            envvar="FULMEN_ALGORITHM_TARGET",
            rich_help_panel=_PANEL,
            help="The algorithm service, HOST:PORT.",
        ),
    ] = None
    llm_proxy_target: Annotated[
        str | None,
        typer.Option(
            "--llm-proxy-target",
            envvar="FULMEN_LLM_PROXY_TARGET",
            rich_help_panel=_PANEL,
            help="The LLM proxy's gRPC port, HOST:PORT; several separated by commas: `proxy health` queries all of them, "
            "other commands the first.",
        ),
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="FULMEN_TOKEN",
            rich_help_panel=_PANEL,
            help="API token; by default the token of the local stack.",
        ),
    ] = field(default=None, repr=False)

    @property
    def deployment(self) -> Deployment:
        """The services that the options mean."""
        return Deployment(
            store=self.store_target or "",
            algorithm=self.algorithm_target or "",
            llm_proxy=self.llm_proxy_target or "",
            token=self.token or "",
            state_dir=self.state_dir,
        )

    @property
    def names_services(self) -> bool:
        """True if a service was named, and so not the stack of the state folder is meant."""
        return self.deployment.names_services

    def open(self) -> AbstractAsyncContextManager[Services]:
        """Opens the channels.

        Raises:
            CommandFailed: if neither a target nor a running stack is known.
        """
        return connect(self.targets(), token=self.bearer(), tls=self.tls())

    def channel(self, target: str) -> FulmenChannel:
        """Opens the channel to one service.

        Raises:
            CommandFailed: if a file for TLS cannot be read.
        """
        return open_channel(target, token=self.bearer(), tls=self.tls())

    def tls(self) -> TlsFiles | None:
        """Returns the TLS files for services that are named; a local stack has no TLS.

        Raises:
            CommandFailed: if a file that the environment names cannot be read.
        """
        files = self.deployment.tls()
        try:
            if files is not None:
                TlsWatch(files)
        except OSError as error:
            text = f"Cannot read TLS file {error.filename}: {error.strerror}. See {CA_VARIABLE} and related variables."
            raise CommandFailed(text, exit_code=Exit.USAGE) from None
        return files

    def targets(self) -> Targets:
        """Returns the address of each service; by default the running stack's addresses or the default ports.

        Raises:
            CommandFailed: if neither a target nor a running stack is known.
        """
        if self.llm_proxy_target:
            _split(self.llm_proxy_target)
        try:
            return self.deployment.targets()
        except LocalStackMissing:
            raise CommandFailed(
                f"No stack is running on {self.state_dir}: start one with `fulmen up`, or name the services with "
                "--store-target, --algorithm-target and --llm-proxy-target."
            ) from None

    def proxies(self) -> list[str]:
        """Returns where every LLM proxy listens that was named, separated by commas.

        Raises:
            CommandFailed: if neither a target nor a running stack is known.
        """
        return _split(self.llm_proxy_target) if self.llm_proxy_target else [self.targets().llm_proxy]

    def bearer(self) -> str | None:
        """Returns the token to send; None if none is known.

        Raises:
            CommandFailed: if the stack's token cannot be read.
        """
        try:
            return self.deployment.bearer()
        except LocalStackMissing:
            return None
        except TokenUnreadable as error:
            raise CommandFailed(str(error)) from None

    @property
    def project(self) -> str:
        """The project in which short names are looked up: the token's, or the default one."""
        return self.deployment.project


def _split(targets: str) -> list[str]:
    found = [each.strip() for each in targets.split(",") if each.strip()]
    if not found:
        raise CommandFailed("--llm-proxy-target is empty: give HOST:PORT.", exit_code=Exit.USAGE)
    return found
