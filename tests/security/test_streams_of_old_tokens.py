"""A stream ends with the token that opened it: at its expiry, and when its signing key is removed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from fulmen.errors import TokenInvalid, Unavailable
from fulmen.store.v1 import project_service_pb2 as prj
from fulmen.store.v1 import resource_pb2
from fulmen.store.v1 import resource_service_pb2 as res
from fulmen_service_kit.security.keys import PublishedKeys, StoreKeys
from fulmen_service_kit.security.tokens import Role, TokenSigner, TokenVerifier
from tests.support.store.running import SIGNING_KEY, StoreHandle, Stubs

LIMIT_S = 20


async def until_it_ends(stream: Any) -> None:
    while True:
        assert not (await stream.read()).resources


async def test_an_open_stream_gets_nothing_more_once_its_token_has_expired(store: StoreHandle, stubs: Stubs) -> None:
    token = TokenSigner(SIGNING_KEY).issue(Role.READER, subject="x", ttl_s=3)
    reader = await store.stubs(token=token)
    stream = reader.resources.WatchResources(res.WatchResourcesRequest())
    async with asyncio.timeout(LIMIT_S):
        while not (await stream.read()).snapshot_complete:
            pass
        with contextlib.suppress(TokenInvalid):
            while True:
                await reader.projects.ListProjects(prj.ListProjectsRequest())
                await asyncio.sleep(0.1)
        secret = resource_pb2.ResourceVersion(name="resources/secret", kind="notes", content=b"x")
        await stubs.resources.PublishResources(res.PublishResourcesRequest(resources=[secret]))
        with pytest.raises(Unavailable, match="open the stream again"):
            await until_it_ends(stream)


def test_a_stream_outlives_neither_its_token_nor_the_key_that_signed_it() -> None:
    old, new = StoreKeys(SIGNING_KEY), StoreKeys("n" * 40)
    keys, now_s = PublishedKeys(), time.time()
    keys.replace(old.published())
    verifier = TokenVerifier(keys, clock=lambda: now_s)
    caller = verifier.verify(TokenSigner(old).issue(Role.SERVICE, subject="x", ttl_s=60))
    verifier.check(caller)
    keys.replace(new.published() + old.published())
    verifier.check(caller)
    keys.replace(new.published())
    with pytest.raises(Unavailable, match="open the stream again"):
        verifier.check(caller)
    keys.replace(old.published())
    verifier.check(caller)
    now_s = caller.expires_s
    with pytest.raises(Unavailable, match="open the stream again"):
        verifier.check(caller)
