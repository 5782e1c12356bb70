"""The service's end: sends files of the folders that the present call of a group reads, and takes those that it writes.

A rank that asks for anything else is told that there is no such file. A file that arrives appears whole, under its name, when
its digest is right; received bytes are kept, and a broken connection continues from there.
"""

import asyncio
import errno
import os
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import structlog

from fulmen_algorithm.cluster.wire import read_message
from fulmen_algorithm.trainers.calls import frame
from fulmen_algorithm.trainers.files.folders import CallFolders
from fulmen_algorithm.trainers.files.messages import (
    ARRIVING,
    CHUNK_BYTES,
    LONGEST_MESSAGE_BYTES,
    MAX_FILES,
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
from fulmen_algorithm.training.files import file_sha256

IDLE_S = 600.0
"""Time without a request after which a line is closed: a rank computes digests of its files."""
LINES_PER_RANK = 2
"""One that the service has not noticed the end of, and a new one."""
_NOTHING = CallFolders()
_log = structlog.get_logger()


class FileServer:
    """Serves the lines of one group.

    Attributes:
        token_file: File with the token with which its ranks call servers of shards; None for no token.
    """

    def __init__(self, ranks: int) -> None:
        """Offers nothing yet."""
        self.token_file: Path | None = None
        self._offered = _NOTHING
        self._most = LINES_PER_RANK * ranks
        self._lines: set[StreamWriter] = set()
        self._digests: dict[tuple[str, int, int, int], str] = {}
        self._listing = asyncio.Lock()

    def offer(self, folders: CallFolders = _NOTHING) -> None:
        """Serves the folders of a call, and no others."""
        self._offered = folders

    def close(self) -> None:
        """Closes the lines and serves nothing more; idempotent."""
        self._offered, self._most, self.token_file = _NOTHING, 0, None
        for writer in self._lines:
            writer.transport.abort()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Answers the requests of one line until it ends."""
        if len(self._lines) >= self._most:
            writer.close()
            return
        self._lines.add(writer)
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    message = await read_message(reader, LONGEST_MESSAGE_BYTES)
                writer.write(frame(msgspec.msgpack.encode(await self._answer(message))))
                await writer.drain()
        except (OSError, EOFError, TimeoutError, ValueError, msgspec.MsgspecError) as error:
            if not isinstance(error, EOFError | ConnectionError):
                _log.warning("file_line_ends", reason=str(error))
        finally:
            self._lines.discard(writer)
            writer.close()

    async def _answer(self, message: bytes) -> Reply:
        request = msgspec.msgpack.decode(message, type=Request)
        try:
            if isinstance(request, ReadToken):
                return Reply(data=await asyncio.to_thread(self._token))
            if isinstance(request, ListFiles):
                # One at a time: all ranks ask for the same, and digests take time.
                async with self._listing:
                    return await asyncio.to_thread(self._list, request)
            return await asyncio.to_thread(self._carry, request)
        except OSError as error:
            return Reply(error=error.errno or errno.EIO, text=error.strerror or "")

    def _token(self) -> bytes:
        if self.token_file is None:
            raise _none("token")
        return self.token_file.read_bytes()

    def _list(self, request: ListFiles) -> Reply:
        folder = Path(request.folder)
        if folder not in self._offered.read | self._offered.written:
            raise _none(request.folder)
        if folder in self._offered.written or not folder.is_dir():
            return Reply(exists=folder.is_dir())
        return Reply(exists=True, files=[self._entry(folder, path) for path in _paths(folder)])

    def _entry(self, folder: Path, path: str) -> FileEntry:
        file = folder / path
        known = file.stat()
        key = (str(file), known.st_ino, known.st_size, known.st_mtime_ns)
        if key not in self._digests:
            if len(self._digests) >= MAX_FILES:
                self._digests.clear()
            self._digests[key] = file_sha256(file)
        return FileEntry(path=path, size_bytes=known.st_size, sha256=self._digests[key])

    def _carry(self, request: ReadFile | FindArrived | WriteFile | FinishFile) -> Reply:
        folders = self._offered.read if isinstance(request, ReadFile) else self._offered.written
        folder = Path(request.folder)
        file = folder / request.path
        if folder not in folders or not is_path_in_folder(request.path):
            raise _none(request.path)
        match request:
            case ReadFile():
                with file.open("rb") as opened:
                    return Reply(data=os.pread(opened.fileno(), CHUNK_BYTES, max(request.offset, 0)))
            case FindArrived():
                arriving = _arriving(file)
                return Reply(exists=file.exists(), offset=arriving.stat().st_size if arriving.exists() else 0)
            case WriteFile():
                return _take(_arriving(file), request)
            case FinishFile():
                return _finish(_arriving(file), file, request.sha256)


def _take(arriving: Path, request: WriteFile) -> Reply:
    if len(request.data) > CHUNK_BYTES:
        raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE))
    arriving.parent.mkdir(parents=True, exist_ok=True)
    with arriving.open("ab") as opened:
        # Bytes that are repeated after a broken connection have arrived already.
        if opened.tell() == request.offset:
            opened.write(request.data)
        elif opened.tell() < request.offset:
            raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE))
        return Reply(offset=opened.tell())


def _finish(arriving: Path, file: Path, sha256: str) -> Reply:
    if file.exists():
        # The line broke after it had appeared.
        if file_sha256(file) != sha256:
            raise OSError(errno.EEXIST, f"{file.name} was written by two ranks, with different content")
        return Reply()
    arriving.parent.mkdir(parents=True, exist_ok=True)
    arriving.touch()
    if (found := file_sha256(arriving)) != sha256:
        arriving.unlink()
        raise OSError(errno.EBADMSG, f"{file.name} has arrived with the SHA-256 {found}, not {sha256}")
    arriving.rename(file)
    return Reply()


def _arriving(file: Path) -> Path:
    return file.with_name(file.name + ARRIVING)


def _paths(folder: Path) -> list[str]:
    found = sorted(_walk(folder))
    if len(found) > MAX_FILES:
        raise OSError(errno.E2BIG, f"{folder.name} has more than {MAX_FILES} files")
    return found


def _walk(folder: Path) -> Iterator[str]:
    for root, _, names in os.walk(folder):
        for name in names:
            file = Path(root, name)
            path = file.relative_to(folder).as_posix()
            # Files may be links, as in the cache of a hub; folders are not followed.
            if is_path_in_folder(path) and file.is_file():
                yield path


def _none(path: str) -> OSError:
    return FileNotFoundError(errno.ENOENT, f"{path} is not a file of the current call")
