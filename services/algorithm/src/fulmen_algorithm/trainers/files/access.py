"""The token with which ranks call servers of shards, and the authorities of these, on a machine that has not the service's files.

Invariant: the token is in a file that its user alone can read, and never in an error.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import structlog

from fulmen_exchange.links.settings import ServerAccess

REFRESH_S = 60.0
"""Time between two looks for a newer token; one is refreshed when half of its life is over."""
_log = structlog.get_logger()


class OwnAccess:
    """Files of this machine in place of the service's."""

    def __init__(self, place: Path, ask: Callable[[], bytes], *, ca_file: str) -> None:
        """Asks nothing yet.

        Args:
            place: Folder of this process.
            ask: Asks the service for the token.
            ca_file: PEM file of the service's authorities on this machine; empty for none.
        """
        self._file = place / "token"
        self._ask = ask
        self._ca_file = ca_file
        self._refreshes = False

    def of(self, access: ServerAccess) -> ServerAccess:
        """Returns an access with files that this machine has.

        Raises:
            OSError: if the token cannot be requested from the service.
        """
        if access.token_file and not Path(access.token_file).exists():
            self._refresh()
            if not self._refreshes:
                self._refreshes = True
                threading.Thread(target=self._keep_fresh, name="token", daemon=True).start()
            access = replace(access, token_file=str(self._file))
        tls = {
            target: replace(files, ca_file=self._ca_file)
            if files is not None and self._ca_file and not Path(files.ca_file).exists()
            else files
            for target, files in access.tls.items()
        }
        return replace(access, tls=tls)

    def _refresh(self) -> None:
        token = self._ask()
        if self._file.exists() and self._file.read_bytes() == token:
            return
        scratch = self._file.with_suffix(".new")
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(token)
        scratch.replace(self._file)

    def _keep_fresh(self) -> None:
        while True:
            time.sleep(REFRESH_S)
            try:
                self._refresh()
            except OSError as error:
                _log.warning("rank_token_not_refreshed", error=type(error).__name__)
