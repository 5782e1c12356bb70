"""Runs one pure target in this process, for so long or so often, and writes what it found to a file.

Two engines: `guided` is atheris, which keeps inputs that reach new code; `plain` mutates the corpus and what it already
made of it. Both stop by themselves, so that a finding does not end the run.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from tests.fuzz.mutation import MAX_BYTES, mutate_bytes
from tests.fuzz.target import Finding, PureTarget, kept_inputs, load, signature

MAX_INPUT_S = 1.0
"""CPU time that no input may take."""
STOP_INPUT_S = 5.0
MAX_SIZE = MAX_BYTES
_POOL = 4096
_PAGE = 4096


class TooSlow(Exception):
    """An input took too long."""


@dataclass(slots=True, kw_only=True)
class Order:
    """What to run.

    Attributes:
        folder: Where the result, the current input and new inputs go.
    """

    target: str
    engine: str
    seed: int
    seconds: float
    runs: int
    folder: Path


@dataclass(slots=True, kw_only=True)
class Run:
    """One run of a target: counts, memory, the slowest input, findings."""

    order: Order
    target: PureTarget
    began: float = field(default_factory=time.monotonic)
    count: int = 0
    slowest_s: float = 0.0
    rss_bytes: dict[int, int] = field(default_factory=dict)
    findings: dict[str, Finding] = field(default_factory=dict)
    current: mmap.mmap = field(init=False)

    def __post_init__(self) -> None:
        """Opens the file that survives a crash of the process."""
        path = self.order.folder / "current"
        path.write_bytes(b"\0" * (MAX_SIZE + 8))
        with path.open("r+b") as file:
            self.current = mmap.mmap(file.fileno(), MAX_SIZE + 8)
        signal.signal(signal.SIGVTALRM, _stop)

    def one(self, data: bytes) -> None:
        """Runs one input; ends the process when the time or the number of runs is used up."""
        if self.count % 64 == 0 and self._is_over():
            self._end()
        data = data[:MAX_SIZE]
        self.current[: 8 + len(data)] = len(data).to_bytes(8, "big") + data
        signal.setitimer(signal.ITIMER_VIRTUAL, STOP_INPUT_S)
        began = time.thread_time()
        try:
            self.target.try_input(data)
        except Exception as error:  # noqa: BLE001  # any error that is no refusal is what is looked for
            self._note(error, data)
        took = time.thread_time() - began
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        if took > self.slowest_s:
            self.slowest_s = took
            if took > MAX_INPUT_S:
                self._note(TooSlow(f"{took:.1f} s"), data)
        self.count += 1
        if self.count in (10_000, 100_000) or self.count % 1_000_000 == 0:
            self.rss_bytes[self.count] = rss_bytes()

    def _is_over(self) -> bool:
        return self.count >= self.order.runs or time.monotonic() - self.began > self.order.seconds

    def _note(self, error: Exception, data: bytes) -> None:
        where = signature(error)
        known = self.findings.get(where)
        if known is None or len(data) < len(known.data):
            what = f"{error}"[:300]
            self.findings[where] = Finding(target=self.order.target, where=where, what=what, data=data)

    def _end(self) -> None:
        self.rss_bytes[self.count] = rss_bytes()
        result = {
            "count": self.count,
            "seconds": time.monotonic() - self.began,
            "slowest_s": self.slowest_s,
            "rss_bytes": self.rss_bytes,
            "findings": [asdict(each) | {"data": each.data.hex()} for each in self.findings.values()],
        }
        (self.order.folder / "result.json").write_text(json.dumps(result))
        sys.stdout.flush()
        os._exit(0)  # libFuzzer does not return from its loop


def rss_bytes(pid: int | None = None) -> int:
    """Returns the resident memory of a process."""
    return int(Path(f"/proc/{pid or os.getpid()}/statm").read_text().split()[1]) * _PAGE


def _stop(_signal: int, _frame: FrameType | None) -> None:
    raise TooSlow(f"stopped after {STOP_INPUT_S:g} s")


def _plain(run: Run) -> None:
    rng = random.Random(run.order.seed)
    seeds = _inputs(run)
    for data in seeds:
        run.one(data)
    pool = list(seeds)
    while True:
        data = _changed(run, rng.choice(seeds if rng.random() < 0.5 else pool), rng)
        run.one(data)
        if rng.random() < 0.1:
            if len(pool) < _POOL:
                pool.append(data)
            else:
                pool[rng.randrange(len(pool))] = data


def _changed(run: Run, data: bytes, rng: random.Random) -> bytes:
    try:
        return run.target.mutate(data, rng)
    except (RecursionError, MemoryError):
        return mutate_bytes(data, rng)


def _guided(run: Run, fuzz: Any) -> None:
    made = run.order.folder / "made"
    made.mkdir()
    for number, data in enumerate(_inputs(run)):
        (made / f"seed-{number}").write_bytes(data)

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        changed: bytes = _changed(run, data, rng) if rng.random() < 0.7 else fuzz.Mutate(data, max_size)
        return changed[:max_size]

    arguments = [sys.argv[0], f"-seed={run.order.seed or 1}", f"-max_len={MAX_SIZE}", "-verbosity=0", "-len_control=0"]
    arguments += ["-rss_limit_mb=0", "-timeout=0", "-handle_segv=0", "-handle_abrt=0", str(made)]
    fuzz.Setup(arguments, run.one, custom_mutator=mutate)
    fuzz.Fuzz()


def _inputs(run: Run) -> list[bytes]:
    return [*run.target.seeds, *(path.read_bytes() for path in kept_inputs(run.order.target))]


def main(arguments: list[str]) -> None:
    """Runs what a JSON document orders."""
    values = json.loads(arguments[0])
    order = Order(**{**values, "folder": Path(values["folder"])})
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    engine: Callable[[Run], None] = _plain
    if order.engine == "guided":
        import atheris

        with atheris.instrument_imports(include=["fulmen", "fulmen_store", "fulmen_llm_proxy", "fulmen_runner"]):
            target = load(order.target)

        def engine(run: Run) -> None:
            _guided(run, atheris)
    else:
        target = load(order.target)
    engine(Run(order=order, target=target))


if __name__ == "__main__":
    main(sys.argv[1:])
