"""A server that dies while it streams sums to ranks: they get the same bits, in this round and in all later ones."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from fulmen_exchange.aggregator.terms import CHUNK_BYTES
from fulmen_exchange.links.grpc_chunks import ReadChunk
from fulmen_exchange.links.grpc_server import dial
from tests.support.exchange.channels import Read, Tapped
from tests.support.exchange.sums import HASTY, alike, exchanged
from tests.support.exchange.world import Join, Site, running

ROWS = 3 * CHUNK_BYTES // 16
"""At a ratio of 4 three chunks, on both ways."""


@pytest.mark.parametrize("settings", [{}, {"ratio_down": 100.0}], ids=["without a residual", "with a residual"])
async def test_a_server_that_dies_in_the_middle_of_a_reply_changes_no_bit(
    settings: dict[str, float], join: Join, tmp_path: Path
) -> None:
    begun, goes_on, main = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def held(read: Read) -> Read:
        async def after_the_first_chunk() -> Any:
            message = await read()
            if isinstance(message, ReadChunk) and message.head.round == 2 and message.head.offset_bytes:
                main.call_soon_threadsafe(begun.set)
                await asyncio.to_thread(goes_on.wait, 20.0)
            return message

        return after_the_first_chunk

    async with running(Site(folder=tmp_path / "dies")) as site, running(Site()) as calm:
        one = await join(
            0, targets=[site.target], rows=ROWS, link=HASTY,
            connect=lambda target: Tapped(dial(target), read=held), **settings,
        )  # fmt: skip
        other = await join(1, targets=[site.target], rows=ROWS, link=HASTY, **settings)
        undisturbed = [await join(rank, targets=[calm.target], rows=ROWS, **settings) for rank in range(2)]
        for number in range(1, 5):
            taking = asyncio.gather(*(asyncio.to_thread(member.exchange, number) for member in (one, other)))
            if number == 2:
                async with asyncio.timeout(30.0):
                    await begun.wait()
                await site.stop()
                goes_on.set()
                await site.start()
            sums, wanted = await taking, await exchanged(number, *undisturbed)
            assert all(alike(sum_, wanted[0]) for sum_ in sums), number
        assert site.shard().lost_residuals == 0
        for member in (one, other, *undisturbed):
            await asyncio.to_thread(member.link.kill)
