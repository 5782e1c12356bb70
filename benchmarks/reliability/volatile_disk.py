"""A disk with a write cache that a power cut empties: one file, served over FUSE, behind a loop device.

    python -m benchmarks.reliability.volatile_disk IMAGE FOLDER

What the kernel writes goes to the cache, and reaches the image with the next flush (FUSE_FSYNC, which a loop device makes of a
flush of its block device). A line `cut FILE SEED` on standard input stops the disk in the middle of whatever it does, and writes
to the file what a power cut leaves: the image, and of the blocks in the cache none (SEED 0) or a random part, since disks write
back when and in what order they like. Nothing that the cut disk is asked for afterwards is done. It ends when its input does.

The protocol is that of <linux/fuse.h>; of a file system there is only one file, `disk`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import select
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT, FILE = 1, 2
LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC, FLUSH, INIT, OPENDIR, RELEASEDIR = (
    1, 2, 3, 4, 14, 15, 16, 17, 18, 20, 25, 26, 27, 29
)  # fmt: skip
INTERRUPT, BATCH_FORGET = 36, 42
UNANSWERED = frozenset({FORGET, INTERRUPT, BATCH_FORGET})
REQUEST = struct.Struct("<IIQQIIII")
ANSWER = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<6Q10I")
TRANSFER = struct.Struct("<QQI")
WRITE_BYTES = 40
VERSION = (7, 31)
ASYNC_READ, BIG_WRITES, MAX_PAGES = 1 << 0, 1 << 5, 1 << 22
MAX_WRITE = 2**20
BUFFER_BYTES = MAX_WRITE + 2**16
FOREVER_S = 10**6
BLOCK = 4096
DIRECTORY_MODE, FILE_MODE = 0o040755, 0o100600


@dataclass(slots=True)
class Cache:
    """A file with what was written to it and has not been flushed.

    Attributes:
        now: Descriptor of what readers see.
        durable: Descriptor of the image.
        dirty: Numbers of the blocks that differ.
    """

    now: int
    durable: int
    dirty: set[int] = field(default_factory=set)

    def write(self, offset: int, data: memoryview) -> None:
        """Writes to the cache alone."""
        os.pwrite(self.now, data, offset)
        self.dirty.update(range(offset // BLOCK, (offset + len(data) - 1) // BLOCK + 1))

    def flush(self) -> None:
        """Writes all that is in the cache to the image."""
        for block in self.dirty:
            os.pwrite(self.durable, os.pread(self.now, BLOCK, block * BLOCK), block * BLOCK)
        self.dirty.clear()

    def left_after_cut(self, seed: int) -> Iterator[tuple[int, bytes]]:
        """Yields the blocks of the cache that a disk happened to have written, with their offsets."""
        chance = random.Random(seed)
        share = chance.random() if seed else 0.0
        for block in sorted(self.dirty):
            if chance.random() < share:
                yield block * BLOCK, os.pread(self.now, BLOCK, block * BLOCK)


class Disk:
    """Answers the kernel's requests on one file."""

    def __init__(self, image: Path, folder: Path) -> None:
        """Mounts the file system; the image keeps what is flushed."""
        self._image = image
        self._size = image.stat().st_size
        work = image.with_suffix(".now")
        _copy(image, work)
        self._cache = Cache(now=os.open(work, os.O_RDWR), durable=os.open(image, os.O_RDWR))
        self._fuse = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        if ctypes.CDLL(None, use_errno=True).mount(b"fulmen-disk", os.fsencode(folder), b"fuse", 0, options) != 0:
            raise OSError(ctypes.get_errno(), "The disk cannot be mounted")

    def serve(self) -> None:
        """Answers until standard input ends, or until the power is cut."""
        while True:
            ready, _, _ = select.select([self._fuse, sys.stdin], [], [])
            if sys.stdin in ready:
                words = sys.stdin.readline().split()
                if words[:1] == ["cut"]:
                    self._cut(Path(words[1]), int(words[2]))
                    sys.stdin.read()
                return
            self._answer(os.read(self._fuse, BUFFER_BYTES))

    def _cut(self, target: Path, seed: int) -> None:
        """Writes what is left after a power cut; from now on nothing is answered."""
        dirty = len(self._cache.dirty)
        _copy(self._image, target)
        kept = 0
        with target.open("r+b") as file:
            for offset, data in self._cache.left_after_cut(seed):
                file.seek(offset)
                file.write(data)
                kept += 1
        sys.stdout.write(f"{dirty} {kept}\n")
        sys.stdout.flush()

    def _answer(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = REQUEST.unpack_from(request)
        if opcode in UNANSWERED:
            return
        body = memoryview(request)[REQUEST.size :]
        try:
            payload, failure = self._payload(opcode, node, body), 0
        except OSError as error:
            payload, failure = b"", -(error.errno or errno.EIO)
        os.write(self._fuse, ANSWER.pack(ANSWER.size + len(payload), failure, unique) + payload)

    def _payload(self, opcode: int, node: int, body: memoryview) -> bytes:
        if opcode == INIT:
            flags = ASYNC_READ | BIG_WRITES | MAX_PAGES
            return struct.pack(
                "<4I2H2I2HI28x", *VERSION, MAX_WRITE, flags, 64, 48, MAX_WRITE, 1, MAX_WRITE // BLOCK, 0, 0
            )
        if opcode == LOOKUP:
            if bytes(body) != b"disk\0":
                raise FileNotFoundError(errno.ENOENT, "no such file")
            return struct.pack("<4Q2I", FILE, 0, FOREVER_S, FOREVER_S, 0, 0) + self._attributes(FILE)
        if opcode in (GETATTR, SETATTR):
            return struct.pack("<QII", FOREVER_S, 0, 0) + self._attributes(node)
        if opcode in (OPEN, OPENDIR):
            return struct.pack("<QII", 0, 0, 0)
        if opcode == STATFS:
            return struct.pack("<5Q4I24x", 0, 0, 0, 1, 0, BLOCK, 255, BLOCK, 0)
        return self._transfer(opcode, body)

    def _transfer(self, opcode: int, body: memoryview) -> bytes:
        if opcode == READ:
            _, offset, size = TRANSFER.unpack_from(body)
            return os.pread(self._cache.now, size, offset)
        if opcode == WRITE:
            _, offset, size = TRANSFER.unpack_from(body)
            self._cache.write(offset, body[WRITE_BYTES : WRITE_BYTES + size])
            return struct.pack("<II", size, 0)
        if opcode == FSYNC:
            self._cache.flush()
        elif opcode not in (FLUSH, RELEASE, RELEASEDIR):
            raise OSError(errno.ENOSYS, "not a request to a disk")
        return b""

    def _attributes(self, node: int) -> bytes:
        mode, size = (DIRECTORY_MODE, 0) if node == ROOT else (FILE_MODE, self._size)
        return ATTRIBUTES.pack(node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, BLOCK, 0)


def _copy(source: Path, target: Path) -> None:
    """Copies a file with its holes."""
    subprocess.run(["cp", "--sparse=always", str(source), str(target)], check=True)


def main() -> None:
    """Serves the image until the input ends."""
    disk = Disk(Path(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    disk.serve()


if __name__ == "__main__":
    main()
