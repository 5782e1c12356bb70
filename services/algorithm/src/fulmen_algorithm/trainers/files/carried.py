"""A rank's end: fetches what a call reads from folders that its machine does not see, and sends what the call has written.

The machine keeps files by their digest, so that its ranks fetch each once: those of the newest `open`, and of the call that reads
now. Invariant: a call is answered after the service has all that it wrote.
"""

import asyncio
import fcntl
import json
import os
import shutil
import time
from asyncio import StreamReader, StreamWriter
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import msgspec

from fulmen_algorithm.cluster.gate import PROCESS
from fulmen_algorithm.cluster.wire import PLACE_VARIABLE, UNSEEN_VARIABLE, VIEWS, Refused, Ticket, connect, read_message
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.calls import OPEN, Hello, frame
from fulmen_algorithm.trainers.files.access import OwnAccess
from fulmen_algorithm.trainers.files.folders import folders_of, moved
from fulmen_algorithm.trainers.files.messages import (
    ARRIVING,
    CHUNK_BYTES,
    LONGEST_MESSAGE_BYTES,
    FileEntry,
    FindArrived,
    FinishFile,
    ListFiles,
    ReadFile,
    ReadToken,
    Reply,
    Request,
    WriteFile,
    is_path_in_folder,
)
from fulmen_algorithm.training.files import OtherArchitecture, StorageFailed, file_sha256, is_storage_trouble

WINDOW = 8
"""Maximum number of concurrent requests."""
REPLY_DEADLINE_S = 600.0
"""Time for an answer: the service may compute digests of a model."""
OUTAGE_LIMIT_S = 120.0
"""Time without an answer after which a transfer is given up; lines that break are opened again until then."""
RETRY_S = 0.5


class CarriedFolders:
    """The folders that this rank's machine does not see as the service does."""

    def __init__(self, ticket: Ticket, rank: int, unseen: Iterable[Path], place: Path) -> None:
        """Fetches nothing yet.

        Args:
            ticket: The group's.
            rank: This rank.
            unseen: The folders; those in them are not seen, either.
            place: Folder of this machine for their files, which its ranks share.
        """
        self._ticket = ticket
        self._rank = rank
        self._unseen = tuple(unseen)
        self._held, self._views = place / "files", place / VIEWS
        self._opened: list[Path] = []
        self._access: OwnAccess | None = None

    @classmethod
    def from_environment(cls, ticket: Ticket, rank: int) -> "CarriedFolders":
        """Returns those that the service has named to this process."""
        unseen = [Path(each) for each in json.loads(os.environ.get(UNSEEN_VARIABLE, "[]"))]
        given = os.environ.get(PLACE_VARIABLE, "")
        place = Path(given or (mkdtemp(prefix="fulmen-rank-") if unseen else "."))
        return cls(ticket, rank, unseen, place)

    @contextmanager
    def there(self, method: str, arguments: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yields the arguments of a call with folders that this machine has; sends what was written at the end.

        Raises:
            OSError: if a file cannot be fetched, sent or written.
        """
        wanted = folders_of(method, arguments)
        read, written = self._carried(wanted.read), self._carried(wanted.written)
        if not read and not written:
            yield self._with_access(arguments) if self._unseen else arguments
            return
        views: dict[Path, Path] = {}
        try:
            for folder in read:
                views[folder] = self._new_view()
                asyncio.run(self._fetch(folder, views[folder]))
            for folder in written:
                views[folder] = self._new_view()
                if not asyncio.run(self._exists(folder)):
                    views[folder].rmdir()
            with _named_as_there(views):
                yield self._with_access(moved(arguments, views))
            for folder in written:
                asyncio.run(self._send(views[folder], folder))
        finally:
            unused = list(views.values())
            if method == OPEN:
                # Its files are kept: the next trainer of this machine is most likely opened with the same.
                unused, self._opened = self._opened, unused
            for view in unused:
                shutil.rmtree(view, ignore_errors=True)

    def _with_access(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        setup = arguments.get("setup")
        if setup is None or setup.server_access is None:
            return arguments
        if self._access is None:
            self._access = OwnAccess(self._new_view(), self._token, ca_file=self._ticket.ca_file)
        return {**arguments, "setup": replace(setup, server_access=self._access.of(setup.server_access))}

    def _token(self) -> bytes:
        async def asked() -> bytes:
            [reply] = [each async for each in self._ask([ReadToken()])]
            return reply.data

        return asyncio.run(asked())

    def _carried(self, folders: Iterable[Path]) -> list[Path]:
        return sorted(each for each in folders if any(each.is_relative_to(unseen) for unseen in self._unseen))

    def _new_view(self) -> Path:
        for folder in (self._held, self._views):
            folder.mkdir(parents=True, exist_ok=True)
        return Path(mkdtemp(dir=self._views))

    async def _exists(self, folder: Path) -> bool:
        [reply] = [each async for each in self._ask([ListFiles(folder=str(folder))])]
        return reply.exists

    async def _fetch(self, folder: Path, view: Path) -> None:
        """Puts the files of a folder of the service into a folder of this machine."""
        [reply] = [each async for each in self._ask([ListFiles(folder=str(folder))])]
        files = [each for each in reply.files if is_path_in_folder(each.path)]
        with (self._held.parent / "lock").open("a") as lock:
            # The other ranks of this machine find the files there. A lock ends with its process.
            await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
            self._drop_unused({each.sha256 for each in files})
            for file in files:
                held = self._held / file.sha256
                if not held.exists():
                    await self._fetch_file(folder, file, held)
                (view / file.path).parent.mkdir(parents=True, exist_ok=True)
                os.link(held, view / file.path)

    def _drop_unused(self, wanted: set[str]) -> None:
        """Removes files that no rank of this machine uses, and none of these."""
        for held in self._held.iterdir():
            if held.stat().st_nlink == 1 and held.name.removesuffix(ARRIVING) not in wanted:
                held.unlink()

    async def _fetch_file(self, folder: Path, file: FileEntry, held: Path) -> None:
        arriving = held.with_name(held.name + ARRIVING)
        with arriving.open("ab") as opened:
            begin = opened.tell()
            offsets = range(begin, file.size_bytes, CHUNK_BYTES)
            requests = [ReadFile(folder=str(folder), path=file.path, offset=offset) for offset in offsets]
            async for reply in self._ask(requests):
                opened.write(reply.data)
        if (found := await asyncio.to_thread(file_sha256, arriving)) != file.sha256:
            arriving.unlink()
            raise OSError(f"{file.path} has arrived with the SHA-256 {found}, not {file.sha256}.")
        arriving.rename(held)

    async def _send(self, view: Path, folder: Path) -> None:
        """Sends the files of a folder of this machine to a folder of the service."""
        for file in sorted(each for each in view.rglob("*") if each.is_file()):
            at = {"folder": str(folder), "path": file.relative_to(view).as_posix()}
            [found] = [each async for each in self._ask([FindArrived(**at)])]
            size_bytes = file.stat().st_size
            left = range(min(found.offset, size_bytes), size_bytes, CHUNK_BYTES) if not found.exists else ()
            with file.open("rb") as opened:
                pieces = (
                    WriteFile(**at, offset=offset, data=os.pread(opened.fileno(), CHUNK_BYTES, offset))
                    for offset in left
                )
                async for _ in self._ask(pieces):
                    pass
            sha256 = await asyncio.to_thread(file_sha256, file)
            async for _ in self._ask([FinishFile(**at, sha256=sha256)]):
                pass

    async def _ask(self, requests: Iterable[Request]) -> AsyncIterator[Reply]:
        """Yields the answers of some requests, in order.

        Raises:
            StorageFailed: if the service's storage is full or unreachable.
            OSError: if the service refuses one, or cannot be reached for too long.
        """
        async for reply in self._answers(requests):
            if reply.error:
                error = OSError(reply.error, reply.text)
                raise StorageFailed(*error.args) if is_storage_trouble(error) else error
            yield reply

    async def _answers(self, requests: Iterable[Request]) -> AsyncIterator[Reply]:
        """Yields the answers; what was under way when a line broke is asked again on a new one."""
        left, waiting = iter(requests), deque[Request]()
        until_s = time.monotonic() + OUTAGE_LIMIT_S
        while True:
            try:
                async for reply in self._on_one_line(left, waiting):
                    until_s = time.monotonic() + OUTAGE_LIMIT_S
                    yield reply
                return
            except Refused as error:
                raise OSError("The service has ended this group.") from error
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                if time.monotonic() > until_s:
                    raise OSError(f"The service cannot be reached for files: {error}") from error
            await asyncio.sleep(RETRY_S)

    async def _on_one_line(self, left: Iterator[Request], waiting: deque[Request]) -> AsyncIterator[Reply]:
        """Sends `waiting` and then `left`, `WINDOW` at a time; `waiting` has those that are not answered yet."""
        reader, writer = await self._line()
        try:
            for request in waiting:
                writer.write(frame(msgspec.msgpack.encode(request)))
            while True:
                for request in islice(left, WINDOW - len(waiting)):
                    waiting.append(request)
                    writer.write(frame(msgspec.msgpack.encode(request)))
                if not waiting:
                    return
                async with asyncio.timeout(REPLY_DEADLINE_S):
                    await writer.drain()
                    message = await read_message(reader, LONGEST_MESSAGE_BYTES)
                waiting.popleft()
                yield msgspec.msgpack.decode(message, type=Reply)
        finally:
            writer.close()

    async def _line(self) -> tuple[StreamReader, StreamWriter]:
        reader, writer = await connect(self._ticket, PROCESS)
        hello = Hello(rank=self._rank, pid=os.getpid(), asks_files=True)
        writer.write(frame(msgspec.msgpack.encode(hello)))
        return reader, writer


@contextmanager
def _named_as_there(views: Mapping[Path, Path]) -> Iterator[None]:
    """Names folders in errors as the service does."""
    try:
        yield
    except (RunFailed, OtherArchitecture) as error:
        text = str(error)
        for folder, view in views.items():
            text = text.replace(str(view), str(folder))
        raise type(error)(text) from error
