"""Follows the keys of backends: those that the store keeps for the project, and the file of the setting.

Invariant: what was known stays in force while the store is away or a file is invalid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final

import structlog
from pydantic import SecretStr

from fulmen.errors import FulmenError, NotFound, PermissionDenied, Unimplemented
from fulmen.rpc.channel import FulmenChannel
from fulmen.secret_names import place
from fulmen.store.v1 import secret_service_pb2, secret_service_pb2_grpc
from fulmen_llm_proxy.backends.access import BackendKeys
from fulmen_llm_proxy.settings import BackendKey
from fulmen_service_kit.security.sealing import CannotOpen, Sealer

__all__ = ["BackendKeyWatch"]

INTERVAL_S: Final = 2.0
DEADLINE_S: Final = 5.0

_log = structlog.get_logger()


class BackendKeyWatch:
    """Background role: passes changed keys on within seconds."""

    def __init__(
        self,
        *,
        channel: FulmenChannel,
        project: str,
        keys: BackendKeys,
        sealer: Sealer | None,
        configured: Callable[[], Mapping[str, BackendKey]],
    ) -> None:
        """Creates the role.

        Args:
            channel: Channel to the store.
            project: Project whose backends are served.
            keys: Keys that it updates.
            sealer: Opens what the store sends; None if this proxy has no secret of attempt keys: then it asks for nothing.
            configured: Returns the keys of the settings. Raises ValueError if their file is invalid.
        """
        self._stub = secret_service_pb2_grpc.SecretServiceStub(channel)
        self._project = project
        self._keys = keys
        self._sealer = sealer
        self._configured = configured
        self._problems: dict[str, str] = {}
        self.is_loaded = sealer is None

    async def run(self) -> None:
        """Follows until cancelled."""
        while True:
            await self.follow_once()
            await asyncio.sleep(INTERVAL_S)

    async def follow_once(self) -> None:
        """Reads both once."""
        self._follow_file()
        if self._sealer is not None:
            await self._follow_store(self._sealer)

    def _follow_file(self) -> None:
        try:
            self._keys.replace_configured(self._configured())
        except ValueError:
            self._note("file", "invalid")
        else:
            self._note("file", "")

    async def _follow_store(self, sealer: Sealer) -> None:
        request = secret_service_pb2.GetBackendKeysRequest(project=self._project)
        try:
            answer = await self._stub.GetBackendKeys(request, timeout=DEADLINE_S)
        except (PermissionDenied, Unimplemented, NotFound) as error:
            # No service token, a store of an earlier release, or a project that is not created yet: there are none.
            self._keys.replace_stored({})
            self._note("store", error.reason)
        except FulmenError as error:
            self._note("store", error.reason)
            return
        else:
            self._keys.replace_stored(self._opened(answer.keys, sealer))
            self._note("store", "")
        self.is_loaded = True

    def _opened(self, sealed: list[secret_service_pb2.SealedKey], sealer: Sealer) -> dict[str, BackendKey]:
        found = {}
        for each in sealed:
            try:
                value = sealer.open(each.sealed, about=place(self._project, each.name, each.hosts))
            except CannotOpen:
                self._note(f"key {each.name}", "sealed for another secret of attempt keys")
                continue
            self._note(f"key {each.name}", "")
            found[each.name] = BackendKey(key=SecretStr(value.decode()), hosts=tuple(each.hosts))
        return found

    def _note(self, source: str, problem: str) -> None:
        """Logs a problem when it begins."""
        if problem and self._problems.get(source) != problem:
            _log.warning("backend_keys_not_read", source=source, reason=problem)
        if problem:
            self._problems[source] = problem
        else:
            self._problems.pop(source, None)
