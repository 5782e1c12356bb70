"""A proxy that has just started waits for its routes before it answers rpcs about them."""

from __future__ import annotations

import asyncio

import pytest

from fulmen.errors import Unavailable
from fulmen_llm_proxy.routing import table_holder
from fulmen_llm_proxy.routing.table import RoutingTable
from fulmen_llm_proxy.routing.table_holder import TableHolder


async def test_an_rpc_continues_when_the_first_table_is_there() -> None:
    tables = TableHolder()
    waiting = asyncio.create_task(tables.loaded())
    await asyncio.sleep(0)
    assert not waiting.done()

    tables.swap(RoutingTable())

    await waiting
    await tables.loaded()  # from now on at once


async def test_an_rpc_is_refused_when_the_store_sends_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_holder, "LOAD_S", 0.01)
    with pytest.raises(Unavailable, match="not loaded its routes"):
        await TableHolder().loaded()
