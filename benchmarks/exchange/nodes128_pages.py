"""Tables and picture of the 128-node model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.exchange.nodes128 import (
    CLAIMED,
    DENSE_SHARE,
    DGC_GAIN,
    DGC_SHARE,
    MARKS,
    NODES,
    OVERLAP,
    QUORUMS,
    SHARDED,
    WAYS,
    Report,
    codec_rate_for,
    gradient_bytes,
    ratio_for,
)

GOAL_SHARE = 0.05
"""Of a step with the sharded aggregator."""


def markdown(report: Report, *, source: str) -> str:
    """Writes all tables; `source` says whence the measured steps are."""
    parts = (_fit(report, source), _claims(report), _candidates(report), _stragglers(report))
    return "\n".join(line for part in parts for line in (*part, ""))


def _fit(report: Report, source: str) -> list[str]:
    model = report.model
    codecs = ", ".join(f"{name} {1e-9 / each:.2g} GB/s" for name, each in model.codec_s_per_byte.items() if each)
    free = ", ".join(name for name, each in model.codec_s_per_byte.items() if not each)
    lines = [
        f"Measured steps: {source}. Fitted to {len(report.fitted)} of them, those with fewer ranks:",
        "",
        f"- a byte takes {model.slowdown:.2f} times what the line's rate says; a message"
        f" {1e3 * model.latency_s:.2g} ms; {100 * model.overlap:.0f} % of the computing hides exchange",
        f"- float32 through a codec: {codecs or 'as was measured'}"
        + (f"; no time could be told for {free}" if free else ""),
        f"- error on the steps that it was fitted to: median {100 * report.on_fitted.median:.0f} %, worst"
        f" {100 * report.on_fitted.worst:.0f} %",
        f"- error on the {len(report.held_back)} steps that were held back: median"
        f" {100 * report.on_held_back.median:.0f} %, worst {100 * report.on_held_back.worst:.0f} %",
        "",
        "| held back | line | measured | predicted | error |",
        "|---|---|---|---|---|",
    ]
    for one, error in zip(report.held_back, report.on_held_back.errors, strict=True):
        step = one.step
        lines.append(
            f"| {step.codec} at {step.exchange.ratio:.3g}x, {step.exchange.topology}, {step.exchange.world_size} ranks"
            f" | {step.line_bytes_per_s * 8 / 1e6:.4g} Mbit/s | {one.step_s:.2f} s | {model.step_s(step):.2f} s"
            f" | {100 * error:+.0f} % |"
        )
    return lines


def _claims(report: Report) -> list[str]:
    cluster, dense, over = report.cluster, report.wire_alone[WAYS[0].name], report.overlapped
    needed = ratio_for(cluster, DGC_SHARE, CLAIMED)
    rate = codec_rate_for(cluster, report.wire_alone[SHARDED.name][CLAIMED], GOAL_SHARE)
    best = max(one[CLAIMED].gain for one in over.values())
    return [
        f"The claim's cluster: all gradients pass a line in {cluster.pass_s:.2f} s (as"
        f" {gradient_bytes(cluster) / 1e9:.2f} GB do at 9.2 Gbit/s), computing takes"
        f" {cluster.compute_s:.2f} s. SIMULATED with these:",
        "",
        f"- dense, {CLAIMED} nodes: {100 * dense[CLAIMED].share:.0f} % of a step, which were claimed, and put in",
        f"- {100 * DGC_SHARE:.0f} % instead of 58 % *is* a gain of {(1 - DGC_SHARE) / (1 - DENSE_SHARE):.2f}x,"
        f" whatever the machines ({DGC_GAIN}x claimed): the two are one claim",
        f"- an all-gather takes {100 * DGC_SHARE:.0f} % with {CLAIMED} nodes at {needed:.0f}x, not at 100x",
        f"- the sharded aggregator, sparse both ways at 100x, takes {100 * GOAL_SHARE:.0f} % if a codec passes"
        f" {rate / 1e9:.0f} GB/s of float32, which is work for a GPU",
        f"- if {100 * OVERLAP:.0f} % of the computing hid exchange, dense would take"
        f" {100 * over[WAYS[0].name][CLAIMED].share:.0f} %, and no way could gain more than {best:.2f}x",
    ]


def _candidates(report: Report) -> list[str]:
    heads = " | ".join(f"{nodes} nodes" for nodes in NODES)
    lines = [
        f"| SIMULATED: exchange, share of a step, gain | {heads} | {CLAIMED} nodes, codec as measured |",
        "|---|" + "---|" * (len(NODES) + 1),
    ]
    for way in WAYS:
        found = [report.wire_alone[way.name][nodes] for nodes in NODES] + [report.with_codecs[way.name][CLAIMED]]
        cells = [f"{one.exchange_s:.2f} s, {100 * one.share:.0f} %, {one.gain:.2f}x" for one in found]
        lines.append(f"| {way.name} | {' | '.join(cells)} |")
    if report.missing:
        lines += ["", f"No codec time was measured for {', '.join(report.missing)}: it is left out."]
    return lines


def _stragglers(report: Report) -> list[str]:
    heads = " | ".join(f"{100 * quorum:.0f} %" for quorum in QUORUMS)
    lines = [
        f"| SIMULATED, {CLAIMED} nodes, sharded, sparse back; quorum | {heads} |",
        "|---|" + "---|" * len(QUORUMS),
    ]
    for name, rounds in report.rounds.items():
        first = rounds[QUORUMS[0]]
        cells = [
            f"{rounds[quorum].round_s:.2f} s a round, {100 * rounds[quorum].late:.0f} % late,"
            f" {rounds[quorum].payloads_per_s / first.payloads_per_s:.2f}x"
            for quorum in QUORUMS
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def replace_part(document: Path, text: str, *, marks: tuple[str, str] = MARKS) -> None:
    """Replaces what stands between the marks.

    Raises:
        ValueError: if the marks are not there.
    """
    begin, end = marks
    old = document.read_text(encoding="utf-8")
    if begin not in old or end not in old:
        raise ValueError(f"{document} has no place for the tables: {begin} and {end}")
    before, after = old.split(begin)[0], old.split(end)[1]
    document.write_text(f"{before}{begin}\n{text}{end}{after}", encoding="utf-8")


def draw(report: Report, path: Path, *, source: str) -> None:
    """Draws shares by number of nodes, and predicted over measured; `source` says whence the measured steps are."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(9.2, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    _shares(left, report)
    _fits(right, report, source)
    figure.savefig(path, dpi=110)


def _shares(axes: Any, report: Report) -> None:
    for way in WAYS:
        by_nodes = report.wire_alone[way.name]
        axes.plot(NODES, [100 * by_nodes[nodes].share for nodes in NODES], marker=".", label=way.name)
    axes.axhline(100 * DGC_SHARE, color="tab:gray", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_xticks(NODES, [str(nodes) for nodes in NODES])
    axes.set_ylim(0, 100)
    axes.set_xlabel("nodes")
    axes.set_ylabel("exchange, % of a step")
    axes.set_title("SIMULATED: the claim's cluster, wire alone (dashed: 22 %)", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7)


def _fits(axes: Any, report: Report, source: str) -> None:
    for name, steps, marker in (("fitted", report.fitted, "o"), ("held back", report.held_back, "x")):
        axes.plot(
            [one.step_s for one in steps],
            [report.model.step_s(one.step) for one in steps],
            marker,
            label=name,
            markersize=5,
        )
    ends = (min(one.step_s for one in report.fitted) / 2, max(one.step_s for one in report.held_back) * 2)
    axes.plot(ends, ends, color="tab:gray", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured seconds of a step")
    axes.set_ylabel("predicted seconds of a step")
    axes.set_title(f"the model on measured steps: {source.replace('`', '')}", fontsize=9)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
