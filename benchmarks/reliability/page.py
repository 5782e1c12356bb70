"""Writes docs/reliability.md from the results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.reliability.cell import LIMIT_S
from benchmarks.reliability.plan import Fault, Victim

__all__ = ["write_page"]

VICTIMS: Final[Mapping[str, tuple[str, str]]] = {
    Victim.STORE: ("store", "clients wait and repeat; leases, reports and creations are in PostgreSQL"),
    Victim.PROXY: ("LLM proxy", "calls under way break; their attempts end as INFRA and are retried"),
    Victim.RUNNER: ("runner, one of two", "its attempts end as LEASE_LOST and are retried elsewhere"),
    Victim.ALGORITHM: ("algorithm service", "its runs resume from their checkpoints, its engines start again"),
    Victim.ENGINE: ("engine", "calls wait in the proxy while it starts again with the same weights"),
    Victim.AGGREGATOR: ("aggregator of gradients", "ranks wait for it; it resumes from its files"),
    Victim.POSTMASTER: ("PostgreSQL's postmaster", "the store answers UNAVAILABLE until recovery is done"),
    Victim.BACKEND: ("one PostgreSQL backend", "PostgreSQL ends all backends and recovers; the store connects again"),
    Victim.SUPERVISOR: ("supervisor of `fulmen up`", "all its services end with it; `fulmen up` starts them again"),
    Victim.KEEPER: ("keeper of commands", "commands under way continue; the runner starts another for the next"),
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

What happens when a process dies, hangs, loses its network, its clock, its disk or its memory in the middle of a training run. This
page is written by `make crash-matrix`; do not edit it.
"""
METHOD: Final = """## Method

{method} The fault is done to one process: signals by kill(2); packets dropped by a filter of the kernel on all sockets of the
victim; resets by `ss -K` twenty times; a clock by libfaketime in that process alone (PostgreSQL has the supervisor's clock); a full
disk by filling a file system in memory that holds the victim's folder (PostgreSQL's is that of the stack's record and logs too); no
memory by a control group in which the victim may use no more than it has, so that the kernel kills it when it asks for a page
(where no group can be made, by RLIMIT_AS at its present size, so that allocations fail). A fault that lasts is over when it was
lifted, or when what it was done to was replaced. PostgreSQL is reached through a Unix socket, so there are no packets to drop. The dead process
is started again by what does so on a user's machine, `fulmen up`; the aggregator by the matrix, half a second after its death. The
supervisor is the exception: a person runs `fulmen up` again, at once, and the seconds until it is ready count.

*Lost* rollouts neither wait nor run nor have ended; *doubled* ones succeeded, were announced or were consumed twice; *skipped* are
groups of prompts that were passed over; *trained twice* are rollouts that two steps used. Retried attempts are none of these.

## Run it

```sh
make crash-matrix                                   # all cells and 20 power cuts
make crash-matrix SHORT=1                           # two cells
make crash-matrix ARGS="--victim store --fault kill"
make crash-matrix ARGS=--resume                     # continues after an interruption
make crash-matrix ARGS="--power-cuts 20"
make crash-matrix ARGS="--stack-cuts 5"             # of whole stacks alone; keeps no figures
```

It needs Linux. Root is needed for namespaces, dropped packets, full disks and power cuts; `nft` (Debian: nftables) for dropped
packets, `libfaketime` for clocks. A cell that cannot be run is listed with the reason. The raw figures are in
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
        "From the end of the fault to 16 more finished rollouts / 2 more training steps, which is more than can have been under way.",
        "Bold: over 30 s, something lost or doubled, a rollout that failed, or a run that did not end.",
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
        "Of kill -9: who noticed first, when, and what it cost.",
        "",
        "| process | noticed after | by | what it means | attempts that were retried | rollouts that failed |",
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

{power["cuts"]} cuts at commit `{power["commit"]}` (seed {power["seed"]}). The files lie in ext4 on a disk whose write cache a cut
empties: what was not flushed is gone, or, in every second cut, a random part of it is there, block by block. PostgreSQL runs as
`fulmen up` starts it (fsync, full_page_writes and synchronous_commit on).

| | |
|---|---|
| cuts of PostgreSQL and a store under load | {len(cuts)} |
| acknowledged rollouts, ends of attempts, spans | {power["acknowledged_rollouts"]}, {power["acknowledged_ends"]}, {power["acknowledged_spans"]} |
| of them lost: rollouts or ends, spans | {power["lost_rollouts"]}, {power["lost_spans"]} |
| starts that failed | {power["corrupt_starts"]} |
| pages with a wrong checksum at the end | {power["damaged_pages"]} |
| blocks of 4 KiB in the cache at a cut, median and most | {dirty[len(dirty) // 2]}, {dirty[-1]} |
| seconds from power to a store that serves, median and most | {starts[len(starts) // 2]}, {starts[-1]} |
| cuts of a whole stack in the middle of a run (spool, checkpoints, lineage and all) | {len(stack)} |
| of these runs ended after `fulmen up` | {ended} |
| rollouts lost, doubled; groups skipped; rollouts trained on twice, over these runs | {_total(stack, "lost")}, {_total(stack, "doubled")}; {_total(stack, "skipped")}; {_total(stack, "trained_twice")} |

What this does not show: disks that say they have flushed and have not, and damage of what was flushed long ago.
"""
