"""The file that holds what was measured; written after every cell, so that a run may be cut off and resumed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.outcome import Claim, claim
from benchmarks.reliability.cell import LIMIT_S
from benchmarks.reliability.plan import FULL, Cell

__all__ = ["Results"]

METHOD = """A stack is started with `fulmen up` and its default settings in its own namespaces. Each cell starts a GRPO run of
small agents that call the model twice, and causes its fault from the second step on. It waits for 16 finished rollouts and 2 steps after the
end of the fault, lets the run end, and checks all its rollouts: as the services list them, in the feed and the lineage of the run, and in
PostgreSQL by its own connection. A fault is detected at the first change of the supervisor's record or of another service's
readiness, or at the first warning in a log."""
GOAL_CELLS = 60
ROOT = Path(__file__).resolve().parents[2]


class Results:
    """Cells and power cuts by key."""

    def __init__(self, path: Path | None, *, resume: bool) -> None:
        """Reads what the file has: what is not measured again stays. Without a file nothing is kept."""
        self._path = path
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {}
        self._cells: dict[str, dict[str, Any]] = {each["key"]: each for each in known.get("cells", ())}
        self._skipped: dict[str, str] = dict(known.get("not_made", {}))
        self._power: dict[str, Any] = known.get("power_cuts", {})
        self._settings: dict[str, Any] = known.get("settings", {})
        self._measured: dict[str, Any] = {name: known[name] for name in ("date", "commit", "machine") if name in known}
        # What another commit did says nothing of this one.
        self._done = {key for key, cell in self._cells.items() if resume and cell.get("commit") == _commit()}

    def has(self, key: str) -> bool:
        """Returns whether a cell need not be run."""
        return key in self._done

    @property
    def has_power_cuts(self) -> bool:
        """Whether the power was cut at this commit."""
        return self._power.get("commit") == _commit()

    def add(self, figures: dict[str, Any], *, settings: Mapping[str, Any]) -> None:
        """Adds a cell and writes the file."""
        self._cells[figures["key"]] = {**figures, "commit": _commit()}
        self._settings = dict(settings)
        self._skipped.pop(figures["key"], None)
        self._write()

    def skip(self, cell: Cell, reason: str) -> None:
        """Notes that a cell cannot be run on this machine."""
        self._skipped[cell.key] = reason
        self._write()

    def add_power_cuts(self, figures: dict[str, Any]) -> None:
        """Adds what power cuts showed and writes the file."""
        self._power = {**figures, "commit": _commit()}
        self._write()

    def shortfalls(self) -> list[str]:
        """Names the cells that fall short."""
        return [cell["key"] for cell in self._in_order() if not (cell["holds"] and cell["within_limit"])]

    def document(self) -> dict[str, Any]:
        """Returns everything, JSON-ready."""
        return {
            "name": "crash_matrix",
            **(self._measured or _present()),
            "method": " ".join(METHOD.split()),
            "settings": self._settings,
            "cells": self._in_order(),
            "not_made": self._skipped,
            "power_cuts": self._power,
            "claims": self._claims(),
        }

    def _in_order(self) -> list[dict[str, Any]]:
        """Returns the cells of the plan that were run."""
        return [self._cells[cell.key] for cell in FULL if cell.key in self._cells]

    def _claims(self) -> list[Claim]:
        cells = self._in_order()
        claims = [claim("cells", len(cells), "cells", goal=GOAL_CELLS, better="higher")]
        for name in ("lost", "doubled", "skipped", "trained_twice"):
            total = sum(cell.get(name, 0) for cell in cells)
            claims.append(claim(f"rollouts {name.replace('_', ' ')}", total, "rollouts", goal=0, better="lower"))
        slow = sum(not cell["within_limit"] for cell in cells)
        stuck = sum(not cell.get("run_ended", False) for cell in cells)
        claims.append(claim(f"cells without work within {LIMIT_S:.0f} s", slow, "cells", goal=0, better="lower"))
        claims.append(claim("runs that did not end", stuck, "runs", goal=0, better="lower"))
        if self._power:
            claims += [
                claim(f"power cuts: {name.replace('_', ' ')}", self._power[name], "", goal=0, better="lower")
                for name in ("lost_rollouts", "lost_spans", "corrupt_starts")
            ]
        return claims

    def _write(self) -> None:
        self._measured = _present()
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(without_checkout(json.dumps(self.document(), indent=1)) + "\n", encoding="utf-8")


def _present() -> dict[str, Any]:
    """Returns the date, the commit and the machine of a measurement that is made now."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "load_at_end": [round(load, 1) for load in os.getloadavg()],
        },
    }


def without_checkout(text: str) -> str:
    """Removes the checkout's folder from the paths in a text: tracebacks of agents name it."""
    return text.replace(f"{ROOT}/", "")


@cache
def _commit() -> str:
    """Returns the commit of the tree, marked if anything but the results was changed since."""
    others = _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs/reliability.md")
    return _git("rev-parse", "--short=12", "HEAD") + ("-changed" if others else "")


def _git(*arguments: str) -> str:
    command = ["git", "-c", "safe.directory=*", *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    return done.stdout.strip()
