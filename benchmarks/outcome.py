"""How every benchmark writes down what it measured: machine, method, raw figures, and claims with their goals.

A claim that falls short stays in the list with its true value.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "results"
Claim = dict[str, object]
SMALL = 0.01


def claim(name: str, value: float, unit: str, *, goal: float, better: str) -> Claim:
    """Makes a claim; `better` is `higher` or `lower`. Whether it is met is decided before rounding."""
    met = value >= goal if better == "higher" else value <= goal
    return {"name": name, "value": _short(value), "unit": unit, "goal": _short(goal), "better": better, "met": met}


def _short(value: float) -> float:
    """Rounds to three decimals, and what is small to three digits."""
    return round(value, 3) if abs(value) >= SMALL else float(f"{value:.3g}")


def write(name: str, *, method: str, raw: object, claims: Sequence[Claim], **more: object) -> None:
    """Writes `results/<name>.json` and prints the claims."""
    save(name, method=method, raw=raw, claims=claims, folder=FOLDER, **more)
    show(None, claims)


def save(name: str, *, method: str, raw: object, claims: Sequence[Claim], folder: Path, **more: object) -> None:
    """Writes `<name>.json` to the folder."""
    document: Mapping[str, object] = {
        "name": name,
        "machine": {
            "cpus": os.cpu_count(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "load_at_end": [round(load, 1) for load in os.getloadavg()],
        },
        "method": " ".join(method.split()),
        **more,
        "raw": raw,
        "claims": list(claims),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def show(raw: object, claims: Sequence[Claim]) -> None:
    """Prints the claims, and the raw figures if there are some."""
    if raw is not None:
        sys.stdout.write(json.dumps(raw, indent=2) + "\n")
    for one in claims:
        sys.stdout.write(
            f"{one['name']}: {one['value']} {one['unit']} (goal {one['goal']}, {one['better']} is better:"
            f" {'met' if one['met'] else 'falls short'})\n"
        )
