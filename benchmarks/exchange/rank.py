"""One rank: reads commands from standard input, one JSON object per line, and answers each with a line.

    python -m benchmarks.exchange.rank '{"rank": 0, "world_size": 2, ...}'

It ends when its input does, whatever it is doing: no rank outlives who started it.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.exchange.contenders import CONTENDERS, HOOKED
from benchmarks.exchange.lines import Place
from benchmarks.exchange.model import rows_of
from benchmarks.exchange.works import Work, Works

MAX_NORM = 1.0
MEET_LIMIT_S = 300.0
FILL = 1e-3
DEVICES = Path("/proc/net/dev")
SENT_COLUMN = 8
Answer = dict[str, Any]


class Rank:
    """A rank with all its works."""

    def __init__(self, place: Place) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = place.interface
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{place.meeting}",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=MEET_LIMIT_S),
        )
        self._place = place
        self._works = Works(place)
        self._step = 0

    def steps(self, contender: str, count: int) -> Answer:
        """Takes steps: seconds of each, CPU seconds and bytes of all, and what the exchange tells."""
        work = self._works.of({**CONTENDERS, **HOOKED}[contender])
        work.take()
        rows = [rows_of(self._place.rank, self._step + number) for number in range(count)]
        self._step += count
        dist.barrier()
        sent, used_s = sent_bytes(self._place.interface), time.process_time()
        taken = [self._take(work, each) for each in rows]
        used_s, sent = time.process_time() - used_s, sent_bytes(self._place.interface) - sent
        told = work.take()
        return {
            "steps": taken,
            "cpu_s": used_s,
            "sent_bytes": sent,
            "figures": dict(told.metrics),
            "events": list(told.events),
            "digest": digest(work.parameters) if work.is_shared else "",
        }

    def transfer(self, contender: str, count: int) -> Answer:
        """Exchanges gradients that are there, so many times; seconds of each."""
        work, found = self._works.of(CONTENDERS[contender]), []
        for _ in range(count):
            for parameter in work.parameters:
                parameter.grad = torch.full_like(parameter, FILL)
            dist.barrier()
            began = time.perf_counter()
            work.exchange(0.0)
            found.append(time.perf_counter() - began)
            work.on_step()
        return {"seconds": found}

    def line(self, size: int) -> Answer:
        """Sends bytes from rank 0 to rank 1 through one socket; Mbit/s of rank 0, 0 of the others."""
        data, reply = torch.zeros(size, dtype=torch.uint8), torch.zeros(1)
        began = time.perf_counter()
        for _ in range(2):
            dist.barrier()
            began = time.perf_counter()
            if self._place.rank == 0:
                dist.send(data, 1)
                dist.recv(reply, 1)
            elif self._place.rank == 1:
                dist.recv(data, 0)
                dist.send(reply, 0)
        seconds = time.perf_counter() - began
        return {"mbit": size * 8e-6 / seconds if self._place.rank == 0 else 0.0}

    def end(self) -> Answer:
        """Ends what is open."""
        self._works.close()
        return {}

    def _take(self, work: Work, rows: torch.Tensor) -> dict[str, float]:
        began = time.perf_counter()
        work.optimizer.zero_grad(set_to_none=True)
        (work.module(rows) * work.share).backward()
        computed = time.perf_counter()
        clips = work.exchange(computed - began)
        exchanged = time.perf_counter()
        if clips:
            nn.utils.clip_grad_norm_(work.parameters, MAX_NORM)
        work.optimizer.step()
        work.on_step()
        ended = time.perf_counter()
        return {"step_s": ended - began, "passes_s": computed - began, "exchange_s": exchanged - computed}


def digest(parameters: list[nn.Parameter]) -> str:
    """Names the bits of weights."""
    found = hashlib.sha256()
    for parameter in parameters:
        found.update(parameter.detach().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def sent_bytes(interface: str) -> int:
    """Returns how many bytes have left through an interface, headers and all."""
    for line in DEVICES.read_text(encoding="ascii").splitlines():
        name, _, columns = line.partition(":")
        if name.strip() == interface:
            return int(columns.split()[SENT_COLUMN])
    raise AssertionError(f"no interface {interface}")


def own_output() -> IO[str]:
    """Returns standard output, and redirects everything else that is written to it to standard error."""
    found = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return found


def orders() -> Callable[[], dict[str, Any]]:
    """Reads orders in a thread, which ends the process with its input; returns what waits for the next."""
    waiting: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=read, name="orders", daemon=True).start()
    return lambda: json.loads(waiting.get())


def main() -> None:
    """Joins the others, and obeys."""
    answers, next_order = own_output(), orders()
    rank = Rank(Place(**json.loads(sys.argv[1])))
    known: dict[str, Callable[..., Answer]] = {
        "steps": rank.steps,
        "transfer": rank.transfer,
        "line": rank.line,
        "end": rank.end,
    }
    while True:
        order = next_order()
        what = order.pop("do")
        answers.write(json.dumps(known[what](**order)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
