"""Malformed input is refused by a typed error, changes nothing, and leaves the store serving."""

from __future__ import annotations

import pytest

from fulmen.errors import ArgumentInvalid, TokenInvalid
from fulmen.store.v1 import lease_pb2, lease_service_pb2, rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from tests.support.store.running import Runner, StoreHandle, Stubs, create


async def test_a_value_that_postgresql_cannot_hold_is_a_callers_mistake(stubs: Stubs) -> None:
    with pytest.raises(ArgumentInvalid):
        await create(stubs, request_id="nul \0 nul")
    far = rollout_pb2.Rollout(not_before_time={"seconds": 2**62})
    with pytest.raises(ArgumentInvalid):
        await stubs.rollouts.BatchCreateRollouts(pb.BatchCreateRolloutsRequest(rollouts=[far]))
    with pytest.raises(ArgumentInvalid):
        await stubs.leases.AcquireLeases(
            lease_service_pb2.AcquireLeasesRequest(max_count=1, info=lease_pb2.RunnerInfo(host="nul \0"))
        )


async def test_a_stream_that_does_not_begin_with_open_is_refused(stubs: Stubs) -> None:
    runner = Runner(stubs)
    runner.stream = stubs.leases.StreamLeases()
    await runner.demand(1)
    with pytest.raises(ArgumentInvalid):
        await runner.read()


async def test_credit_out_of_range_ends_the_stream_and_the_store_serves_on(stubs: Stubs) -> None:
    runner = await Runner(stubs).open()
    await runner.demand(0)
    with pytest.raises(ArgumentInvalid):
        await runner.read()
    assert await create(stubs)


async def test_a_wrong_or_missing_token_is_refused(store: StoreHandle) -> None:
    stranger = await store.stubs(token="not a token")
    with pytest.raises(TokenInvalid):
        await create(stranger)
