"""The places of chunks in a segment: what is packed for PostgreSQL comes back, and says whether a payload is whole."""

from __future__ import annotations

import datetime
import zlib

from hypothesis import given
from hypothesis import strategies as st

from fulmen_store.segments.extents import Entry, SegmentWriter, segment_key, unpack

DAY = datetime.date(2026, 11, 28)
uuids = st.uuids()


@st.composite
def chunks(draw: st.DrawFn) -> list[tuple[Entry, bytes]]:
    """Draws chunks of some rollouts, rollout by rollout."""
    made = []
    for rollout_id in draw(st.lists(uuids, min_size=1, max_size=4, unique=True)):
        for payload in draw(st.lists(st.binary(min_size=1, max_size=50), min_size=1, max_size=4)):
            entry = Entry(
                rollout_id=rollout_id, attempt=draw(st.integers(1, 2**31 - 1)), chunk_id=draw(uuids),
                span_count=draw(st.integers(1, 4096)), codec=draw(st.sampled_from([1, 2])),
                start_ns=draw(st.integers(0, 2**63 - 1)), end_ns=draw(st.integers(0, 2**63 - 1)),
                size_bytes=len(payload), checksum=zlib.crc32(payload),
            )  # fmt: skip
            made.append((entry, payload))
    return made


@given(chunks())
def test_what_is_packed_comes_back_with_its_place(made: list[tuple[Entry, bytes]]) -> None:
    writer = SegmentWriter()
    for entry, payload in made:
        writer.add(entry, payload)
    content, extents = writer.finished()

    assert len(content) == writer.size_bytes == sum(extent.size_bytes for extent in extents)
    assert [extent.rollout_id for extent in extents] == list(dict.fromkeys(entry.rollout_id for entry, _ in made))
    assert all(len(extent.heads) % 47 == 0 for extent in extents)
    found = [entry for extent in extents for entry in unpack(extent, segment_id=7, day=DAY)]
    for entry, (before, payload) in zip(found, made, strict=True):
        assert (entry.segment_id, entry.day) == (7, DAY)
        assert (entry.chunk_id, entry.attempt, entry.span_count) == (before.chunk_id, before.attempt, before.span_count)
        assert (entry.codec, entry.start_ns, entry.end_ns) == (before.codec, before.start_ns, before.end_ns)
        assert entry.holds(content[entry.start_byte : entry.start_byte + entry.size_bytes])
        assert not entry.holds(payload[:-1])
        assert not entry.holds(bytes([payload[0] ^ 1]) + payload[1:])


def test_a_segment_is_named_by_its_day_and_id() -> None:
    assert segment_key(DAY, 255) == "segments/20261128/00000000000000ff"
