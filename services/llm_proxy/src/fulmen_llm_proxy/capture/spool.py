"""The spool: captures on disk while the store is unavailable. Bounded, ordered, and safe across kills.

There are two lanes of files, one for calls that training needs and one for the rest. Space is freed by deleting
complete files of the second. Records of both lanes share one sequence and are read in the order in which they were
written.

Invariant: a file is deleted only when the store has everything in it, or when its lost calls have been reported. Not
thread-safe: everything except the counters runs in one thread.
"""

from __future__ import annotations

import heapq
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from fulmen_llm_proxy.capture.packed import MAX_BATCH_BYTES, Loss, PackedCalls, SpoolFull
from fulmen_llm_proxy.capture.segment import Record, Scan, Segment, encode_record

SUFFIX = ".seg"
UNREADABLE_SUFFIX = ".unreadable"
_NAME = re.compile(r"([0-9]{20})-([tu])-.*\.seg")
_LANES = {True: "t", False: "u"}
_SEGMENTS_PER_SPOOL = 16
_MAX_SEGMENT_BYTES = 8 * 1024 * 1024
_MIN_SEGMENT_BYTES = 64 * 1024

FULL = "spool_full"
DAMAGED = "spool_damaged"
TORN = "spool_torn"
UNREADABLE = "spool_unreadable"


class DiskSpool:
    """The files of one folder, owned by this process."""

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Opens a folder and reads the files in it.

        Args:
            folder: exclusive folder of this process; must exist.
            max_bytes: maximum total size of the files.

        Raises:
            OSError: if the folder cannot be read, or a torn end cannot be truncated.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._segment_bytes = min(_MAX_SEGMENT_BYTES, max(_MIN_SEGMENT_BYTES, max_bytes // _SEGMENTS_PER_SPOOL))
        self._lanes: dict[bool, deque[Segment]] = {True: deque(), False: deque()}
        self._writing: dict[bool, Segment] = {}
        self._read: list[tuple[Segment, PackedCalls]] = []
        self._reached: dict[bool, tuple[Segment, int]] = {}
        self._unreadable: Segment | None = None
        self._losses: deque[Loss] = deque()
        self._next_sequence = time.time_ns()
        self.size_bytes = 0
        self.records = 0
        self.is_dirty = False
        self._open()

    @property
    def is_empty(self) -> bool:
        """Whether everything in it was acknowledged or lost."""
        return not self._lanes[True] and not self._lanes[False]

    def waiting(self) -> dict[str, int]:
        """Returns the number of calls in it by attempt."""
        found: dict[str, int] = {}
        for segment in self._segments():
            for attempt, calls in segment.waiting.items():
                found[attempt] = found.get(attempt, 0) + calls
        return found

    def append(self, packed: list[PackedCalls]) -> None:
        """Appends calls, and removes those written from the list.

        If there is no space, the oldest calls that training does not need are dropped.

        Raises:
            SpoolFull: if there is no space for the rest of the list.
            OSError: if the disk fails.
        """
        while packed:
            first = packed[0]
            run = 1
            while run < len(packed) and packed[run].trainable == first.trainable:
                run += 1
            frames, size_bytes = [], 0
            for number, calls in enumerate(packed[:run]):
                frame = encode_record(Record(sequence=self._next_sequence + number, packed=calls))
                size_bytes += len(frame)
                if not self._make_room(size_bytes):
                    break
                frames.append(frame)
            if frames:
                self._write(packed[: len(frames)], b"".join(frames))
                del packed[: len(frames)]
            elif first.trainable:
                raise SpoolFull
            else:
                # Nothing older of this lane is left to drop.
                self._lost(first.attempt, first.calls, FULL)
                del packed[:1]

    def sync(self) -> None:
        """Syncs written data to disk.

        Raises:
            OSError: if the disk fails.
        """
        self.is_dirty = False
        for segment in self._writing.values():
            segment.sync()

    def read(self) -> list[PackedCalls]:
        """Returns the oldest calls, in order; the same ones until `acknowledge`. Empty if only damaged data is left.

        Raises:
            OSError: if a file cannot be read.
        """
        if self._reached:
            return [packed for _, packed in self._read]
        self._read, size_bytes = [], 0
        reached: dict[bool, tuple[Segment, int]] = {}
        for record, segment, end in heapq.merge(*map(self._records, _LANES), key=lambda found: found[0].sequence):
            size_bytes += len(record.packed.chunk)
            if self._read and size_bytes > MAX_BATCH_BYTES:
                break
            self._read.append((segment, record.packed))
            reached[segment.trainable] = (segment, end)
        else:
            reached = {lane: (held[-1], held[-1].size_bytes) for lane, held in self._lanes.items() if held}
        self._reached = reached
        return [packed for _, packed in self._read]

    def acknowledge(self) -> None:
        """Removes the calls read last.

        Raises:
            OSError: if the disk fails; after a restart the store then receives the calls again.
        """
        for segment, packed in self._read:
            segment.discount(packed)
            self.records -= 1
        for lane, (last, end) in self._reached.items():
            held = self._lanes[lane]
            while held[0] is not last:
                self._remove(held[0], DAMAGED)
            last.delivered_bytes = end
            if last.is_delivered:
                self._remove(last, DAMAGED)
        self._read, self._reached = [], {}

    def give_up_head(self) -> None:
        """Sets the unreadable file aside.

        Raises:
            OSError: if it cannot be renamed.
        """
        segment, self._unreadable = self._unreadable, None
        if segment is None:
            return
        segment.close()
        segment.path.rename(segment.path.with_suffix(UNREADABLE_SUFFIX))
        self._read, self._reached = [], {}
        self._remove(segment, UNREADABLE)

    def drain_losses(self) -> list[Loss]:
        """Returns the losses since the last call."""
        # The disk thread may append meanwhile.
        losses = []
        while self._losses:
            losses.append(self._losses.popleft())
        return losses

    def close(self) -> None:
        """Syncs and closes the files.

        Raises:
            OSError: if the disk fails.
        """
        try:
            self.sync()
        finally:
            for segment in self._segments():
                segment.close()

    def _segments(self) -> Iterator[Segment]:
        yield from self._lanes[True]
        yield from self._lanes[False]

    def _open(self) -> None:
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            name = _NAME.fullmatch(path.name)
            if name is None:
                continue  # not ours
            try:
                data = path.read_bytes()
            except OSError:
                path.rename(path.with_suffix(UNREADABLE_SUFFIX))
                self._lost("", 1, UNREADABLE)
                continue
            segment = Segment(path=path, sequence=int(name[1]), trainable=name[2] == _LANES[True], size_bytes=len(data))
            self._scan(segment, data)
            if not segment.records:
                segment.remove()
                continue
            self._lanes[segment.trainable].append(segment)
            self.size_bytes += segment.size_bytes
            self.records += segment.records

    def _scan(self, segment: Segment, data: bytes) -> None:
        scan = Scan(data)
        for record, _ in scan.records():
            segment.count(record.packed)
            self._next_sequence = max(self._next_sequence, record.sequence + 1)
        torn = scan.end < len(data)
        if torn:
            segment.cut(scan.end)
            self._lost("", 1, TORN)
        for _ in range(scan.damaged - torn):
            self._lost("", 1, DAMAGED)

    def _records(self, lane: bool) -> Iterator[tuple[Record, Segment, int]]:
        for segment in self._lanes[lane]:
            self._unreadable = segment
            for record, end in segment.records_from(segment.delivered_bytes):
                self._unreadable = None
                yield record, segment, end

    def _write(self, packed: list[PackedCalls], frames: bytes) -> None:
        lane = packed[0].trainable
        segment = self._writing.get(lane)
        if segment is None or segment.size_bytes + len(frames) > self._segment_bytes:
            segment = self._begin(lane)
        self.is_dirty = True
        segment.append(frames)
        self.size_bytes += len(frames)
        if segment.records == 0 and segment not in self._lanes[lane]:
            self._lanes[lane].append(segment)
        self._next_sequence += len(packed)
        for calls in packed:
            segment.count(calls)
            self.records += 1

    def _begin(self, lane: bool) -> Segment:
        old = self._writing.pop(lane, None)
        if old is not None:
            old.sync()
            old.close()
        sequence = self._next_sequence
        name = f"{sequence:020d}-{_LANES[lane]}-{self._folder.name}{SUFFIX}"
        segment = Segment(path=self._folder / name, sequence=sequence, trainable=lane)
        self._writing[lane] = segment
        return segment

    def _make_room(self, size_bytes: int) -> bool:
        """Makes space by dropping calls that training does not need; returns whether it suffices."""
        while self.size_bytes + size_bytes > self._max_bytes:
            if not self._drop_oldest():
                return False
        return True

    def _drop_oldest(self) -> bool:
        in_flight, end = self._reached.get(False, (None, 0))
        for segment in self._lanes[False]:
            if in_flight is None or segment.sequence > in_flight.sequence:
                self._remove(segment, FULL)
                return True
        if in_flight is None or end >= in_flight.size_bytes:
            return False
        # Keeps the records being sent; drops those after them in the same file.
        for record, _ in in_flight.records_from(end):
            in_flight.discount(record.packed)
            self.records -= 1
            self._lost(record.packed.attempt, record.packed.calls, FULL)
        self._stop_writing(in_flight)
        self.size_bytes -= in_flight.size_bytes - end
        in_flight.cut(end)
        return True

    def _remove(self, segment: Segment, reason: str) -> None:
        """Deletes a file; calls left in it are counted as lost for this reason."""
        segment.remove()
        self._stop_writing(segment)
        self._lanes[segment.trainable].remove(segment)
        self.size_bytes -= segment.size_bytes
        self.records -= segment.records
        for attempt, calls in segment.waiting.items():
            self._lost(attempt, calls, reason)

    def _stop_writing(self, segment: Segment) -> None:
        if self._writing.get(segment.trainable) is segment:
            del self._writing[segment.trainable]
            segment.close()

    def _lost(self, attempt: str, calls: int, reason: str) -> None:
        self._losses.append(Loss(attempt=attempt, calls=calls, reason=reason))


def sync_folder(folder: Path) -> None:
    """Syncs a folder's entries to disk.

    Raises:
        OSError: if the disk fails.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
