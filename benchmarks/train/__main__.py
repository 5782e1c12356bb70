"""Benchmark of training: what is learned and how soon, asynchronous against synchronous, and where the time goes.

Method: `learning`, `overlap` and `ranks` run whole trainings through the four services on this machine (`fulmen up`, `fulmen
train`); `variants` and `gain` run the same algorithms in one process, without transport; `gain` tests what imitation and
reinforcement learning each leave on tasks that neither saw, with an interval; `trainer`, `publish` and `behind` are
benchmarks.trainer, benchmarks.publish and benchmarks.behind. Accuracy is greedy, on held-out tasks. Goals hold for the worst seed, and no
setting was chosen on a seed that is reported. Metrics without a goal are in `metrics`.

Run `python -m benchmarks.train [--short] [--only PART ...] [--output FOLDER]`; writes train.json and train.png there,
by default to benchmarks/results, after every part. With --only, what was measured of the other parts in the same form
stays.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import outcome
from benchmarks.train import alone, gain, learned, overlap, picture, ranks, variants
from benchmarks.train.metrics import figures_of
from benchmarks.train.stand import say

Part = Callable[..., tuple[dict[str, Any], list[outcome.Claim]]]
PARTS: dict[str, Part] = {
    "learning": learned.run,
    "variants": variants.run,
    "gain": gain.run,
    "overlap": overlap.run,
    "ranks": ranks.run,
    "trainer": alone.trainer,
    "publish": alone.publish,
    "behind": alone.behind,
}
NAME = "train"


@dataclass(slots=True, kw_only=True)
class Measured:
    """What was measured, by part."""

    raw: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, list[outcome.Claim]] = field(default_factory=dict)

    @classmethod
    def kept(cls, folder: Path, *, short: bool) -> Measured:
        """Reads what an earlier run of the same form wrote."""
        file = folder / f"{NAME}.json"
        document = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if document.get("short") != short:
            return cls()
        found = cls(raw=document["raw"], claims={part: [] for part in document["raw"]})
        for claim in document["claims"]:
            found.claims[claim["part"]].append(claim)
        return found

    def add(self, part: str, *, short: bool) -> None:
        """Measures a part."""
        say(part)
        began = time.monotonic()
        raw, claims = PARTS[part](short=short)
        seconds = round(time.monotonic() - began, 1)
        load = [round(each, 1) for each in os.getloadavg()]
        self.raw[part] = {**raw, "measured": {"seconds": seconds, "load_at_end": load}}
        self.claims[part] = [{"part": part, **claim} for claim in claims]
        say(f"{part}: took {seconds:.0f} s")
        outcome.show(None, self.claims[part])

    def write(self, folder: Path, *, short: bool) -> None:
        """Writes results and the picture."""
        ordered = [part for part in PARTS if part in self.raw]
        raw = {part: self.raw[part] for part in ordered}
        claims = [claim for part in ordered for claim in self.claims[part]]
        outcome.save(
            NAME, method=__doc__ or "", raw=raw, claims=claims, folder=folder, short=short, metrics=figures_of(raw)
        )
        picture.draw(raw, folder / f"{NAME}.png")


def main() -> None:
    """Runs the benchmark and writes its results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--short", action="store_true", default=bool(os.environ.get("SHORT")), help="five minutes instead of an hour"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="only these parts; those of the others are kept")
    parser.add_argument("--output", type=Path, default=outcome.FOLDER, help="folder for train.json and train.png")
    given = parser.parse_args()
    measured = Measured.kept(given.output, short=given.short) if given.only else Measured()
    for part in given.only or PARTS:
        measured.add(part, short=given.short)
        measured.write(given.output, short=given.short)
    outcome.show(None, [claim for part in PARTS for claim in measured.claims.get(part, ())])


if __name__ == "__main__":
    main()
