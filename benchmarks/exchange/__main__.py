"""Benchmark of the exchange of gradients, beside PyTorch's: loopback, 1 Gbit/s, 100 Mbit/s, and that with 20 ms.

Method: real processes, a rank each, with a network namespace and a line of its own to a bridge; `tc tbf` gives both
directions of a line their rate, and what a rank sends is delayed by `netem`, or by a process of this benchmark where the
kernel has none. A transformer of 19.1 million parameters learns from 128 tokens for each rank and step, forward and
backward in torch with one thread; clipping and SGD with momentum are the same for all, but for `dgc`, which has both
within. PyTorch's DDP in float32, with its bf16 hook (stock, under another name: by its own it is refused on CPUs) and
its PowerSGD hook of rank 1 (stock, with all gradients in one bucket: with more it aborts on Gloo); and the package's
codecs, summed the way trainers do it, over Gloo, or over gRPC with a process that serves a shard beside each rank.
Ratios are those after the warm-up of the sparsity; `auto` has measured before it is timed. All take turns; a step's time
is that of the slowest rank, the first of a turn is left out unless it takes longer than 2 s; medians and quartiles.
Bytes are those of the interfaces, headers and all. CPU seconds of a rank are with those of the server beside it.
Transfers are of all gradients as they are, without computing.

Run `python -m benchmarks.exchange [--quick] [--only LINE ...] [--output FOLDER]`; writes exchange.json and exchange.png
there, by default to benchmarks/results, after every line. With --only, what was measured of the other lines in the same
form stays. The long form to the default folder also writes tables and picture of docs/exchange-scaling.md. Shaped lines
need root, or user namespaces; without, the loopback interface is all that is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import outcome
from benchmarks.exchange import findings, measure, model, nodes128, nodes128_pages, picture
from benchmarks.exchange.lines import LINES, LinesUnavailable, enter
from benchmarks.exchange.stand import say

NAME = "exchange"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "exchange-scaling.md"
SCALING_PICTURE = DOCUMENT.parent / "images" / "exchange-scaling.png"
MARKS = ("<!-- exchange: begin -->", "<!-- exchange: end -->")
SOURCE = "`make bench-exchange`"


@dataclass(slots=True, kw_only=True)
class Found:
    """What was measured, by line."""

    raw: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def kept(cls, folder: Path, *, short: bool) -> Found:
        """Reads what an earlier run of the same form wrote."""
        file = folder / f"{NAME}.json"
        document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return cls(raw=document["raw"] if document.get("short") == short else {})

    def add(self, line: str, form: measure.Form) -> None:
        """Measures one line."""
        began = time.monotonic()
        found = measure.run(LINES[line], form)
        load = [round(each, 1) for each in os.getloadavg()]
        self.raw[line] = {**found, "measured": {"seconds": round(time.monotonic() - began, 1), "load_at_end": load}}

    def write(self, folder: Path, *, short: bool) -> None:
        """Writes results and picture."""
        self.raw["parameters"] = model.size()
        self.raw["points"] = findings.points(self.raw)
        claims = findings.claims(self.raw)
        if not short:
            claims += [{"part": "nodes128", **claim} for claim in self._simulated()]
        outcome.save(NAME, method=__doc__ or "", raw=self.raw, claims=claims, folder=folder, short=short)
        picture.draw(self.raw, folder / f"{NAME}.png")

    def write_document(self) -> None:
        """Writes the tables and the picture of the document."""
        nodes128_pages.replace_part(DOCUMENT, findings.markdown(self.raw), marks=MARKS)
        report = self._report()
        if report is not None:
            nodes128_pages.replace_part(DOCUMENT, nodes128_pages.markdown(report, source=SOURCE))
            nodes128_pages.draw(report, SCALING_PICTURE, source=SOURCE)

    def _report(self) -> nodes128.Report | None:
        """Returns the model of 128 nodes; None while there is nothing to fit it to, or nothing to hold back."""
        try:
            return nodes128.Report.of(nodes128.steps_of(self.raw["points"]))
        except ValueError as error:
            say(f"128 nodes: {error}")
            return None

    def _simulated(self) -> list[outcome.Claim]:
        report = self._report()
        return report.claims() if report is not None else []


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark and writes its results; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.exchange", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", "--short", dest="short", action="store_true", default=bool(os.environ.get("SHORT")),
        help="some contenders, two ranks, a turn each: minutes",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=LINES, help="only these lines; what was found of others is kept")
    parser.add_argument("--output", type=Path, default=outcome.FOLDER, help="folder for exchange.json and exchange.png")
    given = parser.parse_args(arguments)
    lines, left_out = list(given.only or LINES), ""
    try:
        enter("benchmarks.exchange", arguments)
    except LinesUnavailable as error:
        shaped = [name for name in lines if LINES[name].mbit is not None]
        lines = [name for name in lines if name not in shaped]
        left_out = f"left out: {', '.join(shaped)}. A shaped line {error}" if shaped else ""
        say(left_out)
    form = measure.SHORT if given.short else measure.LONG
    found = Found.kept(given.output, short=given.short) if given.only or left_out else Found()
    for line in lines:
        found.add(line, form)
        found.write(given.output, short=given.short)
    if lines and not given.short and given.output == outcome.FOLDER:
        found.write_document()
    outcome.show(None, findings.claims(found.raw))
    if left_out:
        say(left_out)
    return 1 if left_out else 0


def _terminated(number: int, frame: object) -> None:
    """Ends as Ctrl-C does, so that everything that was started is ended."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        say("interrupted; lines that were measured are in the results")
        sys.exit(130)
