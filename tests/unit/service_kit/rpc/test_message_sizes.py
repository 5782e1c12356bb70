"""Entries of a stream are put together into messages of bounded size."""

from __future__ import annotations

from collections.abc import AsyncIterator

from google.protobuf.wrappers_pb2 import BytesValue

from fulmen_service_kit.rpc.message_sizes import MESSAGE_BYTES, messages_of_stream

KIB = 1024


async def entries(count: int) -> AsyncIterator[BytesValue]:
    """Yields entries of almost a KiB."""
    for _ in range(count):
        yield BytesValue(value=bytes(1000))


async def test_a_stream_that_is_looked_at_begins_with_a_small_message_and_each_is_twice_as_large() -> None:
    sizes = [len(part) async for part in messages_of_stream(entries(4000), first_bytes=64 * KIB)]
    assert sizes[:4] == [limit * KIB // 1003 for limit in (64, 128, 256, 512)]
    assert max(sizes) == MESSAGE_BYTES // 1003
    assert sum(sizes) == 4000


async def test_other_streams_have_messages_of_one_size() -> None:
    sizes = [len(part) async for part in messages_of_stream(entries(2500))]
    assert sizes == [1045, 1045, 410]


async def test_a_first_entry_that_is_larger_than_the_first_message_is_one_of_its_own() -> None:
    sizes = [len(part) async for part in messages_of_stream(entries(3), first_bytes=10)]
    assert sizes == [1, 1, 1]
