"""Formats the stacks of all threads and tasks, for debugging a runner that is stuck.

Invariant: only files, lines, functions and task names appear. Variables, arguments and source lines do not, so that no
agent's data or key leaks.
"""

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import FrameType

MAX_TEXT_BYTES = 1024 * 1024
MAX_FRAMES = 50
MAX_NAMES = 20

_CUT = "\n… truncated\n"


def stacks_text() -> str:
    """Returns the stacks of all threads and of the tasks of the running loop; tasks with equal stacks are grouped.

    Raises:
        RuntimeError: If no event loop is running.
    """
    text = "\n".join((*_threads(), *_tasks()))
    encoded = text.encode(errors="replace")
    if len(encoded) <= MAX_TEXT_BYTES:
        return text
    return encoded[: MAX_TEXT_BYTES - len(_CUT.encode())].decode(errors="ignore") + _CUT


def thread_lines(ident: int) -> str:
    """Returns the stack of a thread, innermost frame last; empty if it has ended. Callable from any thread."""
    return _lines(_outwards(sys._current_frames().get(ident)))


def _threads() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"thread {names.get(ident, ident)}\n{_lines(_outwards(frame))}"


def _tasks() -> Iterator[str]:
    # Hundreds of attempts may wait at the same line.
    same: dict[str, list[str]] = {}
    for task in asyncio.all_tasks():
        # Task.get_stack returns only the outermost frame of a suspended task.
        same.setdefault(_lines(_awaited(task)), []).append(task.get_name())
    for lines, names in sorted(same.items(), key=lambda one: (-len(one[1]), one[0])):
        counts = Counter(names).most_common(MAX_NAMES + 1)
        shown = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in counts[:MAX_NAMES])
        more = ", …" if len(counts) > MAX_NAMES else ""
        yield f"{len(names)} task{'s' if len(names) > 1 else ''}: {shown}{more}\n{lines}"


def _awaited(task: "asyncio.Task[object]") -> list[tuple[str, int, str]]:
    """Returns the stack of a task, innermost frame last, by following its chain of awaits."""
    found: list[tuple[str, int, str]] = []
    at: object = task.get_coro()
    while at is not None and len(found) < MAX_FRAMES:
        frame = getattr(at, "cr_frame", None) or getattr(at, "gi_frame", None) or getattr(at, "ag_frame", None)
        if frame is None:
            break
        found.append(_place(frame))
        at = getattr(at, "cr_await", None) or getattr(at, "gi_yieldfrom", None) or getattr(at, "ag_await", None)
    return found


def _outwards(frame: FrameType | None) -> list[tuple[str, int, str]]:
    found: list[tuple[str, int, str]] = []
    while frame is not None and len(found) < MAX_FRAMES:
        found.append(_place(frame))
        frame = frame.f_back
    return found[::-1]


def _place(frame: FrameType) -> tuple[str, int, str]:
    return frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_qualname


def _lines(places: list[tuple[str, int, str]]) -> str:
    return "".join(f"  {file}:{line} {function}\n" for file, line, function in places)
