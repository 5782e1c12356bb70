"""A line reaches a stream whole, and an error of the stream reaches nobody."""

from __future__ import annotations

import io
import threading

from fulmen_service_kit.standard_streams import MAX_UNFINISHED, LossyStream


class Unbuffered(io.StringIO):
    """Notes each write, which another thread or process could come between."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writes.append(text)
        return len(text)


class Full(io.StringIO):
    """A file on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_printed_line_is_one_write() -> None:
    stream = Unbuffered()
    print("a", "b", file=LossyStream(stream), flush=True)
    assert stream.writes == ["a b\n"]


def test_lines_of_threads_do_not_mix() -> None:
    stream = Unbuffered()
    lossy = LossyStream(stream)
    lossy.write("first")
    other = threading.Thread(target=lambda: print("second", file=lossy))
    other.start()
    other.join()
    lossy.write("\n")
    assert stream.writes == ["second\n", "first\n"]


def test_an_unfinished_line_is_written_by_a_flush_or_when_it_is_long() -> None:
    stream = Unbuffered()
    lossy = LossyStream(stream)
    lossy.write("50 %")
    lossy.flush()
    lossy.write("x" * (MAX_UNFINISHED + 1))
    assert stream.writes == ["50 %", "x" * (MAX_UNFINISHED + 1)]


def test_lines_that_cannot_be_written_are_counted() -> None:
    lossy = LossyStream(Full())
    for _ in range(3):
        print("a", file=lossy, flush=True)
    assert lossy.lost == 3
