"""The ranks that are left of a group that has lost some: they leave what they are in, and hand the state over.

Every wait has a deadline; whatever fails here, the newest checkpoint is there.
"""

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import structlog

from fulmen_algorithm.trainers.calls import HAND_OVER, LEAVE, Answer, decode_result, encode_call
from fulmen_algorithm.trainers.files.folders import folders_of
from fulmen_algorithm.trainers.processes import Group, Link, RankEnded, RankLeft, RankRefused
from fulmen_algorithm.trainers.standings import HandOver, Standing

LEAVE_DEADLINE_S = 120.0
"""Time for ranks to leave a call: they may have passes to end, or files to write."""
WRITE_DEADLINE_S = 900.0
"""Time for ranks to write their state."""
LOOK_S = 0.2
"""Time between two looks at which of the ranks that are waited for have been lost, in seconds."""
Asks = Mapping[int, "asyncio.Task[Answer]"]
"""The call that each rank was asked, by rank; not cancelled, because answers come in order."""
Result = TypeVar("Result")
_log = structlog.get_logger()


async def hand_over(group: Group, asks: Asks, folder: Path, *, ranks_per_copy: int, with_batch: bool) -> bool:
    """Has the ranks that are left of a group write their state to an empty folder.

    Args:
        group: A group that has lost ranks.
        asks: The call that was interrupted.
        folder: Folder that all of them see.
        ranks_per_copy: Ranks that hold a copy of the weights together.
        with_batch: Whether the call was to train a batch.

    Returns:
        False if no copy of the weights is whole, or the ranks do not write it.
    """
    standings = await _until(
        {link.hello.rank: _left(link, asks[link.hello.rank]) for link in group.links}, group, LEAVE_DEADLINE_S
    )
    # One that is left out, since others do not reach it, may answer, and is not waited for.
    standings = {rank: standing for rank, standing in standings.items() if rank not in group.processes.lost}
    order = _order(standings, folder, ranks_per_copy, with_batch=with_batch)
    if order is None:
        return False
    call = encode_call(HAND_OVER, (), {"order": order})
    group.files.offer(folders_of(HAND_OVER, {"order": order}))
    writing = {rank: group.links[rank].ask(call) for rank in order.ranks}
    written = await _until(writing, group, WRITE_DEADLINE_S)
    _log.info("state_handed_over", steps=order.steps, leaders=order.leaders, ranks=sorted(written))
    return written.keys() == writing.keys()


def _order(
    standings: Mapping[int, Standing], folder: Path, ranks_per_copy: int, *, with_batch: bool
) -> HandOver | None:
    """Returns what the ranks that are left write; None if no copy of the weights is whole."""
    copies: dict[int, list[int]] = {}
    for rank, standing in sorted(standings.items()):
        if standing.complete:
            copies.setdefault(rank // ranks_per_copy, []).append(rank)
    whole = [ranks for ranks in copies.values() if len(ranks) == ranks_per_copy]
    if not whole:
        return None
    leaders = max(whole, key=lambda ranks: standings[ranks[0]].steps)
    steps = standings[leaders[0]].steps
    ranks = [rank for each in whole for rank in each]
    return HandOver(folder=folder, steps=steps, ranks=ranks, leaders=leaders, with_batch=with_batch)


async def _left(link: Link, asked: "asyncio.Task[Answer]") -> Standing:
    """Makes a rank leave its current call; returns its progress.

    Raises:
        RankEnded: if it ends or has failed.
    """
    with suppress(OSError):
        link.writer.write(encode_call(LEAVE, (), {}))
    with suppress(RankLeft, RankRefused):
        await asyncio.shield(asked)
    standing: Standing = decode_result(LEAVE, (await link.answer()).result)
    return standing


async def _until(
    works: Mapping[int, Coroutine[Any, Any, Result]], group: Group, deadline_s: float
) -> dict[int, Result]:
    """Waits for each rank until it is lost; returns the results of those that are not."""
    tasks = {rank: asyncio.create_task(work, name=f"rank-{rank}-leaves") for rank, work in works.items()}
    ending = asyncio.create_task(group.lost(), name="group-ends")
    until = asyncio.get_running_loop().time() + deadline_s
    try:
        while waiting := [task for rank, task in tasks.items() if not task.done() and rank not in group.processes.lost]:
            if asyncio.get_running_loop().time() > until:
                break
            await asyncio.wait(waiting, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (*tasks.values(), ending):
            task.cancel()
        await asyncio.wait({*tasks.values(), ending})
    return _done(tasks)


def _done(tasks: Mapping[int, "asyncio.Task[Result]"]) -> dict[int, Result]:
    found: dict[int, Result] = {}
    for rank, task in tasks.items():
        if task.cancelled():
            continue
        if error := task.exception():
            if not isinstance(error, RankEnded | RankRefused | ValueError):
                raise error
            _log.info("rank_cannot_hand_over", rank=rank, reason=str(error))
        else:
            found[rank] = task.result()
    return found


def asks_of(links: Sequence[Link], call: bytes) -> dict[int, "asyncio.Task[Answer]"]:
    """Asks all ranks."""
    return {link.hello.rank: asyncio.create_task(link.ask(call), name=f"rank-{link.hello.rank}") for link in links}
