"""What a rank asks the service about files, and the answers: frames of msgpack, as in `trainers.calls`."""

from pathlib import PurePosixPath

import msgspec

CHUNK_BYTES = 2**20
"""Maximum size of a piece of a file."""
LONGEST_MESSAGE_BYTES = 8 * 2**20
"""Maximum length of a message; a listing of `MAX_FILES` files is shorter."""
MAX_FILES = 10_000
"""Files of a folder."""
MAX_PATH = 512
ARRIVING = ".arriving"
"""Suffix of a file that has not arrived as a whole."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a folder; `path` is relative to it."""

    path: str
    size_bytes: int
    sha256: str


class ListFiles(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks which files a folder has."""

    folder: str


class ReadFile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the `CHUNK_BYTES` of a file that begin at an offset, or those that are left."""

    folder: str
    path: str
    offset: int


class FindArrived(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks whether a file has arrived, and else how many bytes of it have."""

    folder: str
    path: str


class WriteFile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Sends a piece of a file; it begins where the last one has ended."""

    folder: str
    path: str
    offset: int
    data: bytes


class FinishFile(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reports that a file has been sent completely; it then appears, unless its digest differs."""

    folder: str
    path: str
    sha256: str


class ReadToken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Asks for the token with which ranks call servers of shards."""


Request = ListFiles | ReadFile | FindArrived | WriteFile | FinishFile | ReadToken


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer.

    Attributes:
        error: Number of the error of the system (`errno`); 0 for none.
        text: Text of the error.
        exists: Whether the requested folder or file exists.
        files: Its files.
        data: Piece of a file, or the token.
        offset: Number of bytes that have arrived.
    """

    error: int = 0
    text: str = ""
    exists: bool = False
    files: list[FileEntry] = []
    data: bytes = b""
    offset: int = 0


def is_path_in_folder(path: str) -> bool:
    """Returns whether a path can name a file in a folder: relative, without hidden names and `..`."""
    parts = PurePosixPath(path).parts
    is_plain = "\0" not in path and 0 < len(path) <= MAX_PATH and path == "/".join(parts)
    return is_plain and not any(part.startswith((".", "/")) for part in parts)
