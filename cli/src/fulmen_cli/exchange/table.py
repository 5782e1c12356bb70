"""Draws how an exchange of gradients stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen_cli.exchange.shards import Held, LastRound, last_round
from fulmen_cli.exchange.story import PREFIX, Story
from fulmen_cli.output import enum_word

__all__ = ["picture"]

SHARD_COLUMNS: Final = ("shard", "service", "epoch", "round", "members", "received", "sent", "ratio", "sums",
                        "partial", "wait", "removed", "damaged", "residuals lost")  # fmt: skip
RANK_COLUMNS: Final = ("rank", "round", "since round", "late", "silent")
FIRST: Final = ("share", "ratio", "raw_bytes", "sent_bytes", "received_bytes", "wait_seconds", "encode_seconds",
                "transfer_seconds", "decode_seconds")  # fmt: skip
NOTICE_STYLES: Final = {"warning": "yellow", "error": "bold red"}
UNITS: Final = ("B", "kB", "MB", "GB", "TB", "PB")


def picture(settings: Mapping[str, Any], story: Story, held: Sequence[Held]) -> RenderableType:
    """Returns all that is known of an exchange.

    Args:
        settings: Of the run.
        story: What the run's stream says.
        held: What services say of their shards.
    """
    parts: list[RenderableType] = list(_head(settings, story))
    if story.problem:
        parts.append(Text(story.problem, style="yellow"))
    parts += _absences(held)
    shards = [(each.target, shard) for each in held for shard in each.shards]
    if shards:
        parts += [Text(), _shard_table(shards)]
        if members := _rank_table([shard for _, shard in shards]):
            parts += [Text(), members]
    if (went := last_round(held)) is not None:
        parts += [Text(), _round_text(went)]
    if story.tells_any:
        parts += [Text(), _figure_table(story)]
    if story.notices:
        parts.append(Text())
        parts += [
            Text(f"{each.time:%H:%M:%S}  {each.message}", style=NOTICE_STYLES.get(each.severity, ""))
            for each in story.notices
        ]
    return Group(*parts)


def _head(settings: Mapping[str, Any], story: Story) -> Iterator[Text]:
    run = story.run
    yield Text(f"run       {run.name}: {enum_word(run, 'state')}, step {story.step}/{run.step_count or '?'}")
    exchange = settings.get("exchange")
    if not exchange:
        yield Text("exchange  none among the run's settings")
        return
    numbers = [f"{name} {value}" for name, value in exchange.items() if isinstance(value, int | float)]
    kinds = [
        f"{name} {value['kind']}" for name, value in exchange.items() if isinstance(value, dict) and "kind" in value
    ]
    ranks = settings.get("parallel", {}).get("ranks")
    words = [exchange["codec"], *numbers, *kinds, *([f"ranks {ranks}"] if ranks else [])]
    yield Text("exchange  " + ", ".join(words))


def _absences(held: Sequence[Held]) -> Iterator[Text]:
    """Tells which services did not answer, or hold nothing although they were named, and which shards nobody shows."""
    for each in held:
        if each.problem is not None:
            yield Text(f"{each.target} does not answer: {each.problem}", style="bold red")
        elif each.nothing:
            yield Text(f"{each.target} holds no shard of it: {each.nothing}", style="yellow")
    shown = {shard.terms.shard for each in held for shard in each.shards}
    count = max((shard.terms.shard_count for each in held for shard in each.shards), default=0)
    if missing := [str(number) for number in range(count) if number not in shown]:
        others = f"{', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''} of {count}"
        yield Text(f"Not shown: shards {others}; name the services that hold them with --target.", style="yellow")


def _shard_table(shards: Sequence[tuple[str, pb.ShardStatus]]) -> Table:
    table = _table(SHARD_COLUMNS)
    for target, shard in sorted(shards, key=lambda pair: pair[1].terms.shard):
        here, awaited = len(shard.members), shard.terms.world_size
        table.add_row(
            f"{shard.terms.shard} of {shard.terms.shard_count}",
            Text(target),
            str(shard.membership_epoch),
            str(shard.round),
            Text(f"{here} of {awaited}", style="" if here >= awaited else "yellow"),
            size(shard.received_bytes),
            size(shard.sent_bytes),
            f"{shard.ratio:.4g}x",
            f"{shard.sum_count:,}",
            _bad(shard.partial_sum_count, style="yellow"),
            f"{shard.wait_s:.3g} s",
            _bad(shard.removed_member_count),
            _bad(shard.bad_checksum_count),
            _bad(shard.lost_residual_count),
        )
    return table


def _rank_table(shards: Sequence[pb.ShardStatus]) -> Table | None:
    """Draws each rank over all shards: its oldest position, the sums that it missed, its longest silence."""
    members: dict[int, list[tuple[pb.ExchangeMember, pb.ShardStatus]]] = {}
    for shard in shards:
        for member in shard.members:
            members.setdefault(member.rank, []).append((member, shard))
    if not members:
        return None
    table = _table(RANK_COLUMNS)
    for rank, places in sorted(members.items()):
        behind = any(shard.round > member.round + 1 for member, shard in places)
        dying = any(member.idle_s > shard.terms.lease_s / 2 for member, shard in places)
        table.add_row(
            str(rank),
            Text(str(min(member.round for member, _ in places)), style="yellow" if behind else ""),
            str(max(member.first_round for member, _ in places)),
            _bad(sum(member.late_count for member, _ in places), style="yellow"),
            Text(f"{max(member.idle_s for member, _ in places):.1f} s", style="bold red" if dying else ""),
        )
    return table


def _round_text(went: LastRound) -> Text:
    over = f" (of {went.shard_count} shards)" if went.shard_count > 1 else ""
    late = f"; late: {', '.join(map(str, went.late_ranks))}" if went.late_ranks else ""
    return Text(
        f"round {went.number}{over}: ranks {', '.join(map(str, went.ranks))}; {went.duration_s:.3g} s; each sent "
        f"{size(went.sent_bytes)} of {size(went.raw_bytes)} and got {size(went.reply_bytes)}{late}"
    )


def _figure_table(story: Story) -> Table:
    table = _table(("figure", "newest", "step"))
    figures = {name.removeprefix(PREFIX): one for name, one in story.figures.items() if name.startswith(PREFIX)}
    if story.share is not None:
        figures["share"] = story.share
    for name in [*(name for name in FIRST if name in figures), *sorted(figures.keys() - set(FIRST))]:
        table.add_row(Text(name.replace("_", " ")), amount(name, figures[name].value), str(figures[name].step))
    return table


def amount(name: str, value: float) -> str:
    """Writes a figure in the unit that its name ends with."""
    if name.endswith("bytes"):
        return size(value)
    if name.endswith("seconds"):
        return f"{value:.3g} s"
    if name.endswith("ratio"):
        return f"{value:.4g}x"
    if name.endswith("share"):
        return f"{value * 100:.3g} %"
    return f"{value:.4g}"


def size(size_bytes: float) -> str:
    """Writes a number of bytes with three digits: `1.23 MB`."""
    for unit in UNITS[:-1]:
        if abs(size_bytes) < 999.5:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.3g} {UNITS[-1]}"


def _bad(count: int, *, style: str = "bold red") -> Text:
    return Text(f"{count:,}", style=style if count else "")


def _table(columns: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column != "service")
    return table
