"""Removes uploads that are idle, and models that were not used for their retention time."""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from fulmen_algorithm.models.model_store import StoredModel
from fulmen_algorithm.models.uploads import Uploads

INTERVAL_S: Final = 60.0
_log = structlog.get_logger()


class ModelSweeper:
    """The background role."""

    def __init__(self, uploads: Uploads, *, used_by: Callable[[StoredModel], str]) -> None:
        """`used_by` returns the run that needs a model; empty if none does."""
        self._uploads = uploads
        self._used_by = used_by

    async def run(self) -> None:
        """Sweeps until cancelled."""
        while True:
            try:
                await asyncio.to_thread(self._uploads.sweep, lambda model: bool(self._used_by(model)))
            except OSError as error:
                # Full or unreachable for now; whoever needs the storage says so.
                _log.warning("models_not_swept", error=error.strerror)
            await asyncio.sleep(INTERVAL_S)
