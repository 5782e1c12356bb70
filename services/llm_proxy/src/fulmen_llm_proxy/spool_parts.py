"""Opens the spool at start: what an earlier process left is on the attempts' accounts before anybody may ask."""

from __future__ import annotations

import asyncio
import errno
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from fulmen_llm_proxy.capture.ledger import AttemptLedger
from fulmen_llm_proxy.capture.spool import DiskSpool
from fulmen_llm_proxy.capture.spool_folder import SpoolFolder, open_folder
from fulmen_llm_proxy.metrics.service import Metrics
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_service_kit.errors import StartupError

_DISK_FAILS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})

_log = structlog.get_logger(__name__)


async def open_spool(
    settings: LlmProxySettings, instance_id: str, ledger: AttemptLedger, metrics: Metrics, stack: AsyncExitStack
) -> DiskSpool | None:
    """Opens the spool of this process, with what processes that are gone left; None without a folder.

    On a disk that is full or fails the proxy starts without: serving calls comes first.

    Raises:
        StartupError: if the folder is wrong: not a folder, or not this user's.
    """
    if not settings.spool_dir:
        return None
    try:
        folder, spool = await asyncio.to_thread(_open, Path(settings.spool_dir), instance_id, settings.spool_bytes)
    except OSError as error:
        if error.errno in _DISK_FAILS:
            _log.error("spool_disk_failed", errno=error.errno, error=error.strerror)
            metrics.disk_failed()
            return None
        raise StartupError(f"The folder spool_dir={settings.spool_dir} cannot be used: {error.strerror}.") from None
    stack.callback(_close, folder, spool)
    for attempt, calls in spool.waiting().items():
        ledger.adopt(attempt, calls=calls)
    for loss in spool.take_losses():
        _log.error("captures_lost", reason=loss.reason, records=loss.calls)
        metrics.dropped(loss.reason, loss.calls)
    metrics.spool_bytes.set_function(lambda: spool.size_bytes)
    metrics.spool_records.set_function(lambda: spool.records)
    _log.info("spool_opened", adopted_files=folder.adopted, records=spool.records, size_bytes=spool.size_bytes)
    return spool


def _open(root: Path, instance_id: str, max_bytes: int) -> tuple[SpoolFolder, DiskSpool]:
    folder = open_folder(root, instance_id)
    try:
        return folder, DiskSpool(folder.path, max_bytes=max_bytes)
    except OSError:
        folder.close()
        raise


def _close(folder: SpoolFolder, spool: DiskSpool) -> None:
    try:
        spool.close()
    except OSError as error:
        _log.error("spool_disk_failed", errno=error.errno, error=error.strerror)
    finally:
        folder.close()
