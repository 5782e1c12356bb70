"""What follows from what was measured: points for the cost model, claims with their goals, tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks import outcome
from benchmarks.exchange.contenders import AUTO, CONTENDERS, DDP, DDP_BF16, DDP_POWERSGD, DGC, By, Contender
from benchmarks.exchange.lines import LINES, Line

Raw = Mapping[str, Any]
BYTES_OF_FLOAT = 4
IN_A_RING = frozenset({"none", "bf16", "powersgd"})
"""Codecs whose tensors a process group sums; all else, and all that gRPC carries, goes to shards and back."""


def topology_of(contender: Contender) -> str:
    """Says who sends what to whom."""
    return "ring" if contender.codec in IN_A_RING and contender.link == "torch" else "sharded"


def through_line(gradient_bytes: float, contender: Contender, line: Line, world_size: int) -> float:
    """Returns the bytes that a rank's line carries each way where nothing is compressed.

    Through a shared loopback interface also goes what a rank sends to the shard beside it.
    """
    if line.mbit is None and contender.link == "grpc":
        return 2.0 * gradient_bytes
    return 2.0 * (world_size - 1) / world_size * gradient_bytes


def points(raw: Raw) -> list[dict[str, Any]]:
    """Returns the measured steps of the package's codecs, as `nodes128` reads them."""
    found = []
    gradient_bytes = raw["parameters"] * BYTES_OF_FLOAT if "parameters" in raw else 0
    for line, world_size, at in _stands(raw):
        compute_s = at["contenders"]["computing alone"]["step_s"]["median"]
        for name, seen in at["contenders"].items():
            contender = CONTENDERS[name]
            if contender.by is not By.FULMEN or contender.chooses:
                continue
            dense = through_line(gradient_bytes, contender, line, world_size)
            found.append(
                {
                    "codec": contender.codec,
                    "name": name,
                    "link": contender.link,
                    "line": line.name,
                    "topology": topology_of(contender),
                    "world_size": world_size,
                    "gradient_bytes": gradient_bytes,
                    "ratio": round(max(1.0, dense / seen["sent_bytes"]), 3),
                    "line_mbit": line.mbit or at["line_measured_mbit"],
                    "latency_ms": line.latency_ms,
                    "compute_s": compute_s,
                    "step_s": seen["step_s"]["median"],
                    "codec_s": round(codec_s_of(seen), 4),
                    "sent_bytes": seen["sent_bytes"],
                }
            )
    return found


def codec_s_of(seen: Raw) -> float:
    """Returns the seconds of an exchange that sends nothing and waits for no rank."""
    figures = seen["figures"]
    on_line = figures["exchange_transfer_seconds"] + figures["exchange_wait_seconds"]
    return float(max(0.0, seen["exchange_s"]["median"] - on_line))


def claims(raw: Raw) -> list[outcome.Claim]:
    """Returns what the goals come to, of the lines that were measured; each names its part."""
    found: list[outcome.Claim] = []
    for line, world_size, at in _stands(raw):
        steps = {name: seen["step_s"]["median"] for name, seen in at["contenders"].items()}
        where = f"{line.text}, {world_size} ranks"
        told = [seen["weights_equal"] for seen in at["contenders"].values() if seen["weights_equal"] is not None]
        equal = outcome.claim(
            f"{where}: contenders whose ranks hold the same bits after every turn",
            100.0 * sum(told) / len(told), "%", goal=100.0, better="higher",
        )  # fmt: skip
        ones = (*_on_line(line, world_size, steps, where), *_transfers(raw, line, world_size, at, where), equal)
        found += [{"part": line.name, **one} for one in ones]
    return found


def _on_line(line: Line, world_size: int, steps: Mapping[str, float], where: str) -> Iterator[outcome.Claim]:
    if line.name == "100mbit" and world_size == 4:
        for ours in (DGC.name, AUTO.name):
            yield outcome.claim(
                f"{where}: step of {ours} over that of {DDP_POWERSGD.name}",
                steps[ours] / steps[DDP_POWERSGD.name], "x", goal=1.0, better="lower",
            )  # fmt: skip
            yield outcome.claim(
                f"{where}: step of {DDP.name} over that of {ours}",
                steps[DDP.name] / steps[ours], "x", goal=7.0, better="higher",
            )  # fmt: skip
    if line.name == "1gbit":
        for ours in (DGC.name, AUTO.name):
            saved = 100.0 * (1.0 - steps[ours] / steps[DDP_BF16.name])
            yield outcome.claim(
                f"{where}: by how much a step of {ours} is under one of {DDP_BF16.name}",
                saved, "%", goal=20.0, better="higher",
            )  # fmt: skip
    if line.mbit is None:
        above = 100.0 * (steps[AUTO.name] / steps[DDP.name] - 1.0)
        yield outcome.claim(
            f"{where}: by how much a step of {AUTO.name} is above one of {DDP.name}",
            above, "%", goal=5.0, better="lower",
        )  # fmt: skip


def _transfers(raw: Raw, line: Line, world_size: int, at: Raw, where: str) -> Iterator[outcome.Claim]:
    """Tells how much of its line the link over gRPC uses, while it sums all gradients as they are."""
    if line.mbit is None or line.latency_ms:
        return
    for name, rate in transfer_mbit(raw, line, world_size, at).items():
        if CONTENDERS[name].link == "grpc":
            share = 100.0 * rate / line.mbit
            yield outcome.claim(
                f"{where}: share of the line that {name}, fills without computing",
                share, "%", goal=70.0, better="higher",
            )  # fmt: skip


def transfer_mbit(raw: Raw, line: Line, world_size: int, at: Raw) -> dict[str, float]:
    """Returns Mbit/s of gradients through a rank's line, each way, by contender."""
    gradient_bytes = raw["parameters"] * BYTES_OF_FLOAT
    return {
        name: through_line(gradient_bytes, CONTENDERS[name], line, world_size) * 8e-6 / sorted(times)[len(times) // 2]
        for name, times in at["transfers_s"].items()
    }


def markdown(raw: Raw) -> str:
    """Writes the tables."""
    stands = list(_stands(raw))
    heads = " | ".join(f"{line.text}, {world_size}" for line, world_size, _ in stands)
    names = [name for name in CONTENDERS if any(name in at["contenders"] for _, _, at in stands)]
    lines = [f"| seconds of a step; line, ranks | {heads} |", "|---|" + "---|" * len(stands)]
    for name in names:
        cells = [_cell(at["contenders"].get(name), "step_s") for _, _, at in stands]
        lines.append(f"| {_bold(name)} | {' | '.join(cells)} |")
    most = max((world_size for _, world_size, _ in stands), default=0)
    widest = [(line, at) for line, world_size, at in stands if world_size == most]
    heads = " | ".join(line.text for line, _ in widest)
    lines += [
        "",
        f"| {most} ranks: exchange's share of a step, CPU seconds, MB up + down = both, for each rank and step | {heads} |",
        "|---|" + "---|" * len(widest),
    ]
    for name in names:
        cells = [_costs(at["contenders"].get(name)) for _, at in widest]
        lines.append(f"| {_bold(name)} | {' | '.join(cells)} |")
    lines += ["", *_choices(stands), "", *_line_rates(raw, stands)]
    return "\n".join(lines) + "\n"


def _choices(stands: list[tuple[Line, int, Raw]]) -> list[str]:
    found = []
    for line, world_size, at in stands:
        if at["choice"] is not None:
            events = [text for text in at["choice"]["events"] if "compression pays" in text]
            said = events[-1] if events else "nothing yet"
            found.append(
                f"- {line.text}, {world_size} ranks, `auto` after {at['choice']['steps']} steps,"
                f" {at['choice']['seconds']:.0f} s: {said}"
            )
    return found


def _line_rates(raw: Raw, stands: list[tuple[Line, int, Raw]]) -> list[str]:
    lines = ["| Mbit/s, each way | one socket | all gradients as they are: gRPC | Gloo |", "|---|---|---|---|"]
    for line, world_size, at in stands:
        rates = transfer_mbit(raw, line, world_size, at)
        by_link = {CONTENDERS[name].link: f"{rate:.0f}" for name, rate in rates.items()}
        lines.append(
            f"| {line.text}, {world_size} ranks | {at['line_measured_mbit']:.0f} | {by_link.get('grpc', '')}"
            f" | {by_link.get('torch', '')} |"
        )
    return lines


def _bold(name: str) -> str:
    return f"**{name}**" if CONTENDERS[name].by is By.FULMEN else name


def _cell(seen: Raw | None, key: str) -> str:
    if seen is None:
        return ""
    spread = seen[key]
    return f"{spread['median']:.3g} ({spread['q1']:.3g} to {spread['q3']:.3g})"


def _costs(seen: Raw | None) -> str:
    if seen is None:
        return ""
    up, down = (each / 1e6 for each in ways(seen))
    moved = f"{up:.3g} + {down:.3g} = {up + down:.3g}"
    return f"{100 * seen['exchange_share']:.0f} %, {seen['cpu_s']['median']:.2g} s, {moved}"


def ways(seen: Raw) -> tuple[float, float]:
    """Returns the bytes of a rank and step that go up, to be summed, and those of sums that come down.

    Those of a ring, and of contenders that do not tell, are half of what they send each.
    """
    figures = seen.get("figures", {})
    half = seen["sent_bytes"] / 2
    return figures.get("exchange_up_bytes", half), figures.get("exchange_down_bytes", half)


def _stands(raw: Raw) -> Iterator[tuple[Line, int, Raw]]:
    """Yields what was measured, by line and number of ranks, in order."""
    for name, line in LINES.items():
        for world_size, at in raw.get(name, {}).items():
            if world_size.isdigit():
                yield line, int(world_size), at
