"""Uploads that send nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.errors import DeadlineExceeded
from fulmen_algorithm.transport import weights


async def test_an_open_upload_that_sends_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sent() -> AsyncIterator[pb.UploadChunksRequest]:
        yield pb.UploadChunksRequest(path="a")
        await asyncio.Event().wait()

    monkeypatch.setattr(weights, "IDLE_TIMEOUT_S", 0.05)
    requests = sent()
    first = await weights.next_chunk(requests)
    assert first is not None
    assert first.path == "a"
    with pytest.raises(DeadlineExceeded, match="No chunk arrived"):
        await weights.next_chunk(requests)
    assert await weights.next_chunk(requests) is None, "the stream is over"
