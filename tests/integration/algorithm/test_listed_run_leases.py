"""What an algorithm service hears of the runs of others, from a real store."""

from __future__ import annotations

import pytest

from fulmen.rpc.channel import open_channel
from fulmen_algorithm.clients.run_leases import StoreRunLeases
from fulmen_algorithm.runs.ports import RunRecord
from fulmen_service_kit.security.tokens import Role
from fulmen_store.database.queries import SQL
from tests.support.store.running import running_store


class Ahead:
    """Statements, of which the one that reads the clock for lists is an hour ahead."""

    def __getitem__(self, name: str) -> str:
        return SQL[name].replace("select now() as now", "select now() + interval '1 hour' as now")


async def test_a_clock_that_was_set_back_hides_no_run(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running_store(database_url) as store,
        open_channel(store.target, token=store.token(Role.SERVICE)) as channel,
    ):
        leases = StoreRunLeases(channel, owner="a", storage="s", address=lambda: "a:1", ttl_s=60)
        with monkeypatch.context() as patch:
            patch.setattr("fulmen_store.database.database.SQL", Ahead())
            assert await leases.changed() == []
        run = "projects/default/trainingRuns/one"
        await leases.create([RunRecord(training_run=run, policy="p", record=b"x")], request_id="r")
        assert [each.training_run for each in await leases.changed()] == [run]
        assert [each.training_run for each in await leases.changed()] == [run]
