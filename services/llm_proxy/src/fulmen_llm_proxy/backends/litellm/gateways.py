"""The processes of all vendors that routes lead to: one for each vendor's address, so that none can reach another's."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from pathlib import Path
from typing import Final

import aiohttp
import structlog

from fulmen_llm_proxy.backends.litellm.gateway import (
    NOT_INSTALLED,
    REMEDY,
    Gateway,
    GatewayDown,
    GatewaySettings,
    Vendor,
)
from fulmen_llm_proxy.routing.table import Backend, RoutingTable
from fulmen_llm_proxy.routing.table_holder import TableHolder
from fulmen_llm_proxy.settings import LlmProxySettings

__all__ = ["LitellmGateways"]

URL: Final = "http://litellm/v1"
"""Base URL of every process; which one is called depends on the connection."""

TOO_MANY: Final = "litellm_too_many"

_log = structlog.get_logger(__name__)


class LitellmGateways:
    """Background role: starts the process of a vendor when a route leads to it, and ends it when none does."""

    def __init__(self, settings: LlmProxySettings, tables: TableHolder) -> None:
        """Notes the settings; nothing is started before a route leads to a vendor."""
        self._settings = settings
        self._tables = tables
        self._shared: GatewaySettings | None = None
        self._gateways: dict[Vendor, Gateway] = {}
        self._running: dict[Vendor, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        # At the moment of the swap, so that a call by a new route finds the process.
        tables.follow(self._follow)

    async def run(self) -> None:
        """Keeps the processes running until cancelled."""
        if not self._settings.litellm_python:
            await asyncio.Event().wait()
        with tempfile.TemporaryDirectory(prefix="fulmen-litellm-") as folder:
            self._shared = self._shared_settings(Path(folder))
            self._follow(self._tables.current)
            try:
                await asyncio.Event().wait()
            finally:
                self._shared = None
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)

    async def session(self, backend: Backend) -> tuple[aiohttp.ClientSession, Gateway]:
        """Returns the process of a backend and the connections to it; waits while it starts. The caller sets the deadline.

        Raises:
            GatewayDown: if it takes no calls.
        """
        gateway = self._gateways.get(Vendor.of(backend))
        if gateway is None:
            raise self._missing()
        return await gateway.session(), gateway

    def problem_of(self, backend: Backend) -> str:
        """Returns the kind of what keeps a backend from taking calls; empty if nothing does, or no route leads to it."""
        vendor = Vendor.of(backend)
        gateway = self._gateways.get(vendor)
        if gateway is not None:
            return gateway.problem
        return self._missing().kind if vendor in self._routed(self._tables.current) else ""

    def _missing(self) -> GatewayDown:
        if not self._settings.litellm_python:
            return GatewayDown(NOT_INSTALLED, f"needs LiteLLM, which is not set up: {REMEDY}")
        text = f"needs one process more than the {self._settings.litellm_processes} of the setting litellm_processes"
        return GatewayDown(TOO_MANY, text)

    def _shared_settings(self, folder: Path) -> GatewaySettings:
        settings = self._settings
        return GatewaySettings(
            python=settings.litellm_python,
            folder=folder,
            connect_timeout_s=settings.connect_timeout_s,
            read_timeout_s=max(settings.first_byte_timeout_s, settings.read_timeout_s),
            max_request_bytes=settings.max_request_bytes,
            max_answer_bytes=settings.max_answer_bytes,
        )

    def _routed(self, table: RoutingTable) -> set[Vendor]:
        """Returns the vendors that a route leads to."""
        named = {target.backend_id for route in table.routes.values() for target in route.targets}
        return {Vendor.of(each) for name, each in table.backends.items() if each.provider and name in named}

    def _follow(self, table: RoutingTable) -> None:
        if self._shared is None:
            return
        wanted = self._routed(table)
        for vendor in self._gateways.keys() - wanted:
            del self._gateways[vendor]
            self._running.pop(vendor).cancel()
        free = self._settings.litellm_processes - len(self._gateways)
        for vendor in sorted(wanted - self._gateways.keys(), key=lambda each: (each.provider, each.base_url))[:free]:
            self._gateways[vendor] = gateway = Gateway(self._shared, vendor, next(self._numbers))
            self._running[vendor] = task = asyncio.create_task(gateway.run(), name=f"litellm-{vendor.provider}")
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        for vendor in wanted - self._gateways.keys():
            _log.error("litellm_process_refused", provider=vendor.provider, processes=len(self._gateways))

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("litellm_keeper_ended", task=task.get_name(), exc_info=error)
