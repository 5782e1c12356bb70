"""Unpacks agents' bundles, once per content.

Invariant: a bundle's directory appears complete or not at all, within the limits of `fulmen.bundles`. Attempts share the
directory read-only (root can still write); it is deleted when its last user has ended.
"""

import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

import structlog

from fulmen.bundles import BundleInvalid, protect, unpack
from fulmen_runner.agents.python.threads import run_in_thread
from fulmen_runner.agents.specification import Bundle
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.uses import Uses
from fulmen_service_kit.isolation.trees import delete_tree

_READ_ONLY_DIRECTORY = 0o555
_PREFIX = "bundle-"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackedBundle:
    """An unpacked bundle with its reference count."""

    directory: Path
    uses: Uses


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackedBundles:
    """The bundles in use.

    Attributes:
        work_dir: Parent of their directories.
    """

    work_dir: Path
    _used: dict[str, UnpackedBundle] = field(default_factory=dict)
    _numbers: "count[int]" = field(default_factory=count)

    async def unpacked(self, bundle: Bundle) -> UnpackedBundle:
        """Returns the unpacked bundle, with a use that the caller has to end.

        Raises:
            AgentFailed: If it cannot be unpacked; see `unpack_bundle`.
        """
        digest = bundle.sha256_hex
        used = self._used.get(digest)
        # Counted before it is unpacked, so that it is not deleted meanwhile.
        if used is None or not used.uses.begin():
            # A new directory each time: the deletion of the previous one may be pending.
            directory = _directory(self.work_dir, f"{digest}-{next(self._numbers)}")
            used = UnpackedBundle(directory=directory, uses=Uses(release=partial(self._release, digest)))
            self._used[digest] = used
        with ExitStack() as undo:
            undo.callback(used.uses.end)
            await run_in_thread(unpack_bundle, bundle.archive, used.directory.name.removeprefix(_PREFIX), self.work_dir)
            undo.pop_all()
        return used

    def _release(self, digest: str) -> None:
        directory = self._used.pop(digest).directory
        if directory.is_dir():
            threading.Thread(target=_delete, args=(directory,), name="bundle deletion", daemon=True).start()


def unpack_bundle(archive: bytes, name: str, work_dir: Path) -> Path:
    """Unpacks a tar.gz and returns its directory; does nothing if the directory exists. Blocks.

    Raises:
        AgentFailed: If the archive is malformed, too large when unpacked, or contains an unsafe member.
    """
    target = _directory(work_dir, name)
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=work_dir) as directory:
        inside = Path(directory, "bundle")
        inside.mkdir()
        try:
            unpack(archive, inside)
        except BundleInvalid as error:
            raise AgentFailed(f"agent bundle cannot be unpacked: {error}") from None
        protect(inside)
        try:
            inside.rename(target)
            # A read-only directory could not be renamed.
            target.chmod(_READ_ONLY_DIRECTORY)
        except OSError:
            # A concurrent call may have created it with the same content.
            if not target.is_dir():
                raise
    return target


def _directory(work_dir: Path, name: str) -> Path:
    return work_dir / f"{_PREFIX}{name}"


def _delete(directory: Path) -> None:
    try:
        delete_tree(directory)
    except OSError as error:
        _log.warning("bundle_not_deleted", path=str(directory), error=str(error))
