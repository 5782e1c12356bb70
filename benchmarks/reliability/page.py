"""Writes docs/reliability.md from the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.reliability.cell import LIMIT_S
from benchmarks.reliability.plan import Fault, Victim

__all__ = ["write_page"]

VICTIMS: Final[Mapping[str, tuple[str, str]]] = {
    Victim.STORE: ("store", "clients wait and retry; leases, reports and creations are in PostgreSQL"),
    Victim.PROXY: ("LLM proxy", "running calls break; their attempts end as INFRA and are retried"),
    Victim.RUNNER: ("runner, one of two", "its attempts end as LEASE_LOST and are retried elsewhere"),
    Victim.ALGORITHM: ("algorithm service", "its runs resume from their checkpoints; its engines are restarted"),
    Victim.ENGINE: ("engine", "calls wait in the proxy until it has restarted with the same weights"),
    Victim.AGGREGATOR: ("aggregator of gradients", "ranks wait for it; it resumes from its files"),
    Victim.POSTMASTER: ("PostgreSQL's postmaster", "the store answers UNAVAILABLE until recovery is done"),
    Victim.BACKEND: ("one PostgreSQL backend", "PostgreSQL ends all backends and recovers; the store reconnects"),
    Victim.SUPERVISOR: ("supervisor of `fulmen up`", "all its services end with it; `fulmen up` restarts them"),
    Victim.KEEPER: ("keeper of commands", "running commands continue; the runner starts another keeper for the next"),
}
FAULTS: Final[Mapping[str, str]] = {
    Fault.NONE: "none",
    Fault.KILL: "kill -9",
    Fault.TWICE: "kill -9 twice",
    Fault.TERM: "SIGTERM",
    Fault.STOP: "SIGSTOP 20 s",
    Fault.DROP: "packets dropped 20 s",
    Fault.RESET: "resets for 10 s",
    Fault.CLOCK_AHEAD: "clock +1 h 20 s",
    Fault.CLOCK_BEHIND: "clock -1 h 20 s",
    Fault.DISK: "disk full 20 s",
    Fault.MEMORY: "no memory 20 s",
}
HEAD: Final = """# Reliability

How Fulmen recovers when a process dies or hangs, or loses its network, clock, disk or memory in the middle of a training run, and after
power cuts: measured times and losses. `make crash-matrix` writes this page; do not edit it.
"""
METHOD: Final = """## Method

{method}

| fault | made by |
|---|---|
| kill -9, SIGTERM, SIGSTOP | kill(2) on one process |
| packets dropped | a filter of the kernel on all sockets of the victim. PostgreSQL is reached through a Unix socket, so there are no packets |
| resets | `ss -K`, twenty times |
| clock | libfaketime in that process only (PostgreSQL has the supervisor's clock) |
| disk full | filling a file system in memory that holds the victim's folder (PostgreSQL's is also that of the stack's record and logs) |
| no memory | a control group that allows the victim no more memory than it has, so that the kernel kills it at its next page; where no group can be made, RLIMIT_AS at its current size, so that allocations fail |

A lasting fault ends when it is lifted, or when the affected process has been replaced. Dead processes are restarted as on a user's
machine, by `fulmen up`. There are two exceptions: the matrix restarts the aggregator, half a second after its death; and after the death
of the supervisor a person runs `fulmen up` again, at once, and the seconds until it is ready count.

| word | meaning |
|---|---|
| lost | a rollout that neither waits nor runs nor has ended |
| doubled | a rollout that succeeded, was announced or was consumed twice |
| skipped | a group of prompts that was never used |
| trained twice | a rollout that two steps used |

Retried attempts are none of these.

## Run it

```sh
make crash-matrix                                   # all cells and 20 power cuts
make crash-matrix SHORT=1                           # two cells
make crash-matrix ARGS="--victim store --fault kill"
make crash-matrix ARGS=--resume                     # continues after an interruption
make crash-matrix ARGS="--power-cuts 20"
make crash-matrix ARGS="--stack-cuts 5"             # power cuts of whole stacks only; stores no figures
```

It needs Linux; root for namespaces, dropped packets, full disks and power cuts; `nft` (Debian: nftables) for dropped packets; and
`libfaketime` for clocks. A cell that cannot be run is listed with the reason. The raw figures are in
`benchmarks/results/crash_matrix.json`.
"""


def write_page(document: dict[str, Any], path: Path) -> None:
    """Writes the page."""
    cells = document["cells"]
    parts = [HEAD, _summary(document), _table(cells), _deaths(cells), _falls_short(cells, document["not_made"])]
    parts += [_power(document["power_cuts"]), METHOD.format(method=document["method"])]
    path.write_text("\n".join(part for part in parts if part), encoding="utf-8")


def _summary(document: dict[str, Any]) -> str:
    cells, machine = document["cells"], document["machine"]
    harmed = [cell for cell in cells if cell["fault"] != Fault.NONE]
    within = sum(cell["within_limit"] for cell in harmed)
    ended = sum(cell.get("run_ended", False) for cell in cells)
    lost, doubled = _total(cells, "lost"), _total(cells, "doubled")
    skipped, twice = _total(cells, "skipped"), _total(cells, "trained_twice")
    return (
        f"Measured on {document['date']} at commit `{document['commit']}` on {machine['cpus']} cores ({machine['platform']}, "
        f"Python {machine['python']}): {len(harmed)} cells with a fault and {len(cells) - len(harmed)} without. "
        f"{lost} rollouts lost, {doubled} doubled, {skipped} groups skipped, {twice} rollouts trained on twice. "
        f"{ended} of {len(cells)} runs ended with all their steps. In {within} of {len(harmed)} cells rollouts and steps continued "
        "within 30 s of the fault's end.\n"
    )


def _total(cells: Iterable[dict[str, Any]], name: str) -> int:
    return sum(cell.get(name, 0) for cell in cells)


def _table(cells: list[dict[str, Any]]) -> str:
    faults = [fault for fault in FAULTS if any(cell["fault"] == fault for cell in cells)]
    rows = {"+".join(cell["victims"]): cell["victims"] for cell in cells}
    known = {cell["key"]: cell for cell in cells}
    lines = [
        "## Seconds until work continues",
        "",
        "From the end of the fault to 16 more finished rollouts / 2 more training steps, which is more than can have been running.",
        "Bold: over 30 s, a lost or doubled rollout, a rollout that failed, or a run that did not end.",
        "",
        "| victim | " + " | ".join(FAULTS[fault] for fault in faults) + " |",
        "|---" * (len(faults) + 1) + "|",
    ]
    for key, victims in rows.items():
        row = [_cell(known.get(f"{key}/{fault}")) for fault in faults]
        lines.append(f"| {' and '.join(VICTIMS[victim][0] for victim in victims)} | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "–"
    if "created" not in cell:
        return "**not reached**"
    text = f"{_seconds(cell['rollouts_s'])} / {_seconds(cell['steps_s'])}"
    if cell["ready_by_hand_s"] is not None:
        text += f", ready after {_seconds(cell['ready_by_hand_s'])}"
    if not cell["run_ended"]:
        text += ", run did not end"
    return text if cell["holds"] and cell["within_limit"] else f"**{text}**"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def _deaths(cells: list[dict[str, Any]]) -> str:
    lines = [
        "## When a process dies",
        "",
        "After kill -9: when the death was first noticed and by whom, and what it cost.",
        "",
        "| process | noticed after | by | effect | retried attempts | failed rollouts |",
        "|---|---|---|---|---|---|",
    ]
    for cell in cells:
        if cell["fault"] != Fault.KILL or len(cell["victims"]) > 1 or "created" not in cell:
            continue
        name, meaning = VICTIMS[cell["victims"][0]]
        retried = ", ".join(f"{count} {kind}" for kind, count in cell["retried"].items()) or "0"
        noticed = "never" if cell["detected_s"] is None else f"{cell['detected_s']} s"
        lines.append(f"| {name} | {noticed} | {cell['detected_by']} | {meaning} | {retried} | {cell['failed']} |")
    return "\n".join(lines) + "\n"


def _falls_short(cells: list[dict[str, Any]], not_made: dict[str, str]) -> str:
    short = [cell for cell in cells if not (cell["holds"] and cell["within_limit"])]
    lines = ["## What falls short", ""] if short or not_made else []
    lines += [f"- `{cell['key']}`: {_one_line(_why_short(cell))}" for cell in short]
    lines += [f"- `{key}` was not run: {reason}" for key, reason in not_made.items()]
    return "\n".join(lines) + "\n" if lines else ""


def _why_short(cell: dict[str, Any]) -> str:
    """Returns what a cell falls short of: its notes, what was broken, and the last line of the first error."""
    said = list(cell["notes"])
    if problems := cell.get("problems"):
        said += [f"rollouts that failed: {cell['failed']}"] if cell["failed"] else []
        said.append(next((each for each in problems if "\n" in each), problems[0]).strip().splitlines()[-1])
    if not cell.get("run_ended", True):
        said.append("the run did not end")
    elif not cell["within_limit"]:
        said.append(f"work did not continue within {LIMIT_S:.0f} s after the fault")
    return "; ".join(said)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")[:240]


def _power(power: dict[str, Any]) -> str:
    if not power:
        return ""
    cuts = power["store_cuts"]
    dirty = sorted(cut["blocks_in_cache"] for cut in cuts)
    starts = sorted(cut["start_s"] for cut in cuts)
    stack = power["stack"]
    ended = sum(cut.get("run_ended", False) for cut in stack)
    return f"""## Power cuts

{power["cuts"]} cuts at commit `{power["commit"]}` (seed {power["seed"]}). The files are in ext4 on a disk with a write cache that a
cut empties: data that was not flushed is gone; in every second cut, a random part of its blocks remains. PostgreSQL runs as `fulmen up`
starts it (fsync, full_page_writes and synchronous_commit on).

| | |
|---|---|
| cuts of PostgreSQL and a store under load | {len(cuts)} |
| acknowledged: rollouts, ends of attempts, spans | {power["acknowledged_rollouts"]}, {power["acknowledged_ends"]}, {power["acknowledged_spans"]} |
| lost of these: rollouts or ends, spans | {power["lost_rollouts"]}, {power["lost_spans"]} |
| starts that failed | {power["corrupt_starts"]} |
| pages with a wrong checksum at the end | {power["damaged_pages"]} |
| blocks of 4 KiB in the cache at a cut, median and maximum | {dirty[len(dirty) // 2]}, {dirty[-1]} |
| seconds from power-on to a serving store, median and maximum | {starts[len(starts) // 2]}, {starts[-1]} |
| cuts of a whole stack in the middle of a run (spool, checkpoints, lineage and all) | {len(stack)} |
| of these runs, ended after `fulmen up` | {ended} |
| rollouts lost, doubled; groups skipped; rollouts trained on twice, over these runs | {_total(stack, "lost")}, {_total(stack, "doubled")}; {_total(stack, "skipped")}; {_total(stack, "trained_twice")} |

Not shown: disks that report a flush without doing it, and damage of data that was flushed long ago.
"""
