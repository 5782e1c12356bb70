"""Requests that never arrive whole: nothing is read of a caller that no token names, and a project's count among its calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from fulmen.errors import QuotaExceeded
from fulmen.store.v1 import rollout_service_pb2
from fulmen_service_kit.rpc import edge
from fulmen_service_kit.rpc.server import CONNECTION_STREAMS
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.service_kit.raw_http2 import MAX_STREAMS, raw_http2
from tests.support.store.running import StoreHandle, create_project, running_store

PROJECT = "projects/team-a"
MAX_CALLS = 4
WAIT_S = 60.0
SIZE_BYTES = 2**20
LISTS = "/fulmen.store.v1.RolloutService/ListRollouts"
WATCHES = "/fulmen.store.v1.RolloutService/WatchRollouts"
KEYS = "/fulmen.store.v1.ProjectService/ListSigningKeys"


@pytest.fixture
async def limited(database_url: str) -> AsyncIterator[StoreHandle]:
    """Yields a store with a project that may make few calls at the same time."""
    async with running_store(database_url, project_max_calls=MAX_CALLS) as store:
        await create_project(await store.stubs(), PROJECT)
        yield store


@pytest.mark.parametrize("rpc", [LISTS, WATCHES])
async def test_a_caller_that_no_token_names_is_refused_before_its_request_arrives(
    limited: StoreHandle, rpc: str
) -> None:
    forged = TokenSigner("another key that has enough bytes").issue(Role.CLIENT, subject="x", ttl_s=60)
    async with raw_http2(limited.port) as client, asyncio.timeout(WAIT_S):
        for authorization in ("", f"Bearer {forged}", "nothing"):
            call = await client.call(rpc, authorization, b"x", size_bytes=SIZE_BYTES)
            await client.wait_answered(call)
            assert client.answer_bytes[call] == 0, "an error alone"


async def test_requests_that_do_not_arrive_count_among_the_open_calls_of_their_project(limited: StoreHandle) -> None:
    authorization = f"Bearer {limited.token(Role.CLIENT, project=PROJECT)}"
    client = await limited.stubs(role=Role.CLIENT, project=PROJECT)
    request = rollout_service_pb2.ListRolloutsRequest(project=PROJECT)
    async with raw_http2(limited.port) as slow, asyncio.timeout(WAIT_S):
        calls = [await slow.call(LISTS, authorization, b"x", size_bytes=SIZE_BYTES) for _ in range(MAX_CALLS + 1)]
        await slow.wait_answered(*calls)
        with pytest.raises(QuotaExceeded, match="project_max_calls"):
            await client.rollouts.ListRollouts(request)
        assert len(slow.answer_bytes) == 1, "all but one are open"


async def test_a_connection_has_so_many_calls_at_the_same_time(limited: StoreHandle) -> None:
    async with raw_http2(limited.port) as client, asyncio.timeout(WAIT_S):
        await client.wait_answered(await client.call(LISTS, "", b""))
        assert client.settings[MAX_STREAMS] == CONNECTION_STREAMS


async def test_what_needs_no_token_has_to_arrive_in_time(limited: StoreHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge, "OPEN_BODY_LIMIT_S", 0.1)
    async with raw_http2(limited.port) as client, asyncio.timeout(WAIT_S):
        call = await client.call(KEYS, "", b"x", size_bytes=SIZE_BYTES)
        await client.wait_answered(call)
        assert client.answer_bytes[call] == 0, "an error alone"
