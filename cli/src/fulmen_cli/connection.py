"""Where the services are and who calls: from options, then the environment, then the stack of the state folder."""

from __future__ import annotations

import base64
import binascii
import json
import os
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fulmen.client import Client, Targets, connect
from fulmen.ids import ALL_PROJECTS, DEFAULT_PROJECT
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.tls import CA_VARIABLE, TlsFiles, TlsWatch
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.local.record import DEFAULT_STATE_DIR, StackFolder

__all__ = ["Connection", "claims_of"]


_PANEL: Final = "Where to connect"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The options of every command that calls a service; unset ones come from the running stack."""

    state_dir: Annotated[
        Path,
        typer.Option(
            "--state-dir", envvar="FULMEN_STATE_DIR", rich_help_panel=_PANEL, help="State directory of the local stack."
        ),
    ] = Path(DEFAULT_STATE_DIR)
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
            help="The LLM proxy's gRPC port, HOST:PORT; several separated by commas: `proxy health` asks all of them, "
            "other commands the first.",
        ),
    ] = None
    token: Annotated[
        str | None,
        typer.Option(
            "--token",
            envvar="FULMEN_TOKEN",
            rich_help_panel=_PANEL,
            help="API token; by default that of the local stack.",
        ),
    ] = field(default=None, repr=False)

    @property
    def names_services(self) -> bool:
        """True if a service was named, and so not the stack of the state folder is meant."""
        return any((self.store_target, self.algorithm_target, self.llm_proxy_target))

    def open(self) -> AbstractAsyncContextManager[Client]:
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
        """Returns with what services are called that somebody named; a stack of this machine has no TLS.

        Raises:
            CommandFailed: if a file that the environment names cannot be read.
        """
        if not self.names_services:
            return None
        files = TlsFiles.from_environment()
        try:
            if files is not None:
                TlsWatch(files)
        except OSError as error:
            text = f"Cannot read TLS file {error.filename}: {error.strerror}. See {CA_VARIABLE} and related variables."
            raise CommandFailed(text, exit_code=Exit.USAGE) from None
        return files

    def targets(self) -> Targets:
        """Returns the address of each service; by default those of the running stack or the default ports.

        Raises:
            CommandFailed: if neither a target nor a running stack is known.
        """
        known = self._recorded_targets()
        given = {"store": self.store_target, "algorithm": self.algorithm_target, "llm_proxy": self.llm_proxy_target}
        if not known and not any(given.values()):
            raise CommandFailed(
                f"No stack is running on {self.state_dir}: start one with `fulmen up`, or name the services with "
                "--store-target, --algorithm-target and --llm-proxy-target."
            )
        usual = {"store": "127.0.0.1:7101", "algorithm": "127.0.0.1:7301", "llm_proxy": "127.0.0.1:7201"}
        named = {name: given[name] or known.get(name) or usual[name] for name in usual}
        return Targets(**{**named, "llm_proxy": _split(named["llm_proxy"])[0]})

    def proxies(self) -> list[str]:
        """Returns where every LLM proxy listens that was named, separated by commas.

        Raises:
            CommandFailed: if neither a target nor a running stack is known.
        """
        return _split(self.llm_proxy_target) if self.llm_proxy_target else [self.targets().llm_proxy]

    def bearer(self) -> str | None:
        """Returns the token to send; None if none is known."""
        if self.token:
            return self.token
        if self.names_services:
            return None
        record = StackFolder(self.state_dir).read()
        if record is None:
            return None
        path = Path(record.client_token_file)
        if not os.access(path, os.R_OK):
            raise CommandFailed(f"Cannot read the stack's token file {path}: give a token with --token.")
        return path.read_text(encoding="utf-8").strip()

    @property
    def project(self) -> str:
        """The project in which short names are looked up: the token's, or the default one."""
        claims = claims_of(self.bearer() or "") or {}
        bound = str(claims.get("prj", ALL_PROJECTS))
        return DEFAULT_PROJECT if bound == ALL_PROJECTS else bound

    def _recorded_targets(self) -> dict[str, str]:
        folder = StackFolder(self.state_dir)
        record = folder.read()
        return record.targets if record is not None and folder.is_running() else {}


def claims_of(bearer: str) -> dict[str, Any] | None:
    """Returns the claims of a token, unverified; None if it is not one of Fulmen."""
    parts = bearer.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, UnicodeDecodeError, json.JSONDecodeError):
        return None
    return claims if isinstance(claims, dict) and isinstance(claims.get("exp"), int) else None


def _split(targets: str) -> list[str]:
    found = [each.strip() for each in targets.split(",") if each.strip()]
    if not found:
        raise CommandFailed("--llm-proxy-target is empty: give HOST:PORT.", exit_code=Exit.USAGE)
    return found
