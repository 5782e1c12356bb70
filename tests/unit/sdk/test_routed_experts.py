"""Experts of calls: their file, and how calls of one conversation become one record."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.model_call import ModelCallInvalid
from fulmen.routed_experts import RoutedExperts, RoutedExpertsInvalid, merged, read_npy, write_npy
from fulmen.trajectories import Trajectory, trajectory
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen.type.v1.model_call_pb2 import RoutedExperts as Message
from tests.support.sdk.trajectory_cases import chunk_of, plain, record_of

FORM = {"layers": 1, "top_k": 1, "entry_bytes": 1}


@given(st.sampled_from([np.uint8, np.uint16]), st.tuples(*[st.integers(1, 9)] * 3))
def test_the_file_is_that_of_numpy(dtype, shape) -> None:
    values = np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    file = io.BytesIO()
    np.save(file, values)
    read = read_npy(file.getvalue())
    assert (read.spans, read.layers, read.top_k) == (((0, shape[0]),), shape[1], shape[2])
    assert read.packed == values.tobytes()
    assert write_npy(read) == file.getvalue()


@given(st.lists(st.none() | st.tuples(st.integers(0, 20), st.integers(1, 8)), max_size=6))
def test_of_several_records_the_first_that_knows_a_token_counts(ranges) -> None:
    known: dict[int, int] = {}
    records = []
    for index, found in enumerate(ranges):
        if found is None:
            records.append(None)
            continue
        start, size = found
        records.append(RoutedExperts(**FORM, spans=((start, start + size),), packed=bytes([index]) * size))
        known = dict.fromkeys(range(start, start + size), index) | known
    result = merged(records)
    if not known:
        assert result is None
        return
    tokens = [token for start, end in result.spans for token in range(start, end)]
    assert dict(zip(tokens, result.packed, strict=True)) == known
    assert all(end < after for (_, end), (after, _) in zip(result.spans, result.spans[1:], strict=False))


def test_every_problem_of_a_record_is_said() -> None:
    with pytest.raises(RoutedExpertsInvalid, match="0 layers of 2 experts; entries of 3 bytes; ranges of tokens"):
        RoutedExperts(layers=0, top_k=2, entry_bytes=3, spans=((4, 2),), packed=b"")
    with pytest.raises(RoutedExpertsInvalid, match="5 bytes for 2 tokens of 2 bytes"):
        RoutedExperts(layers=2, top_k=1, entry_bytes=1, spans=((0, 2),), packed=bytes(5))


def conversation(*experts: Message | None) -> Trajectory:
    first = plain([1, 2], [3, 4])
    second = plain([1, 2, 3, 4, 5], [6])
    records = []
    for index, (call, packed) in enumerate(zip((first, second), experts, strict=True)):
        record = record_of(call, index)
        written = ModelCallRecord.FromString(record.model_call)
        if packed is not None:
            written.routed_experts.CopyFrom(packed)
        record.model_call = written.SerializeToString()
        records.append(record)
    return trajectory([chunk_of(records)])


def message(values: bytes, first_token: int = 0, **form: int) -> Message:
    return Message(**{**FORM, **form}, first_token=first_token, experts=values)


def test_calls_of_one_conversation_become_one_row_with_one_record() -> None:
    # The first call's last token was computed by the second.
    (row,) = conversation(message(b"\x01\x01\x01"), message(b"\x02\x02\x02\x02\x02")).rows
    assert row.routed_experts == RoutedExperts(**FORM, spans=((0, 5),), packed=b"\x01\x01\x01\x02\x02")


def test_a_call_without_experts_leaves_its_tokens_unknown() -> None:
    (row,) = conversation(None, message(b"\x02\x02", first_token=3)).rows
    assert row.routed_experts == RoutedExperts(**FORM, spans=((3, 5),), packed=b"\x02\x02")
    (row,) = conversation(None, None).rows
    assert row.routed_experts is None


def test_calls_of_different_models_in_one_row_are_refused() -> None:
    with pytest.raises(ModelCallInvalid, match="different forms"):
        conversation(message(b"\x01\x01\x01"), message(bytes(10), layers=2))


def test_a_damaged_record_is_refused() -> None:
    with pytest.raises(ModelCallInvalid, match="3 bytes for 1 tokens of 2 bytes"):
        conversation(message(b"\x01\x01\x01", layers=2), None)
