"""The codecs that tests run through, and a decoder of docs/exchange-wire.md that shares nothing with them."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fulmen_exchange import wire
from fulmen_exchange.codecs.codec import Bucket, Codec, LinearCodec, Payload, Round, SegmentCodec, State
from fulmen_exchange.registry import load_codecs

SIZES = (1, 7, 8, 9, 511, 513, 4095, 4096, 4097, 9001)
"""Around the multiples that codecs count in, and one of no kind."""


def made(name: str, **settings: Any) -> Codec:
    """Makes a codec by its name."""
    entry = load_codecs()[name]
    return entry.make(entry.settings(**settings))


def segment(name: str, **settings: Any) -> SegmentCodec:
    """Makes a codec whose payloads a shard sums."""
    codec = made(name, **settings)
    assert isinstance(codec, SegmentCodec)
    return codec


def linear(name: str, **settings: Any) -> LinearCodec:
    """Makes a codec whose tensors are summed."""
    codec = made(name, **settings)
    assert isinstance(codec, LinearCodec)
    return codec


KEEPING: Mapping[str, Callable[[], SegmentCodec]] = {
    "topk": lambda: segment("topk"),
    "topk_exact": lambda: segment("topk", exact=True),
    "dgc_without_momentum": lambda: segment("dgc", momentum=0.0),
    "topk_quantised_2": lambda: segment("topk_quantised", bits=2),
    "topk_quantised_5": lambda: segment("topk_quantised", bits=5, exact=True),
    "topk_quantised_8": lambda: segment("topk_quantised", bits=8),
    "double_quantization_down_2": lambda: segment("double_quantization", bits_down=2).reply(),
    "double_quantization_down_4": lambda: segment("double_quantization", bits_down=4).reply(),
    "double_quantization_down_8": lambda: segment("double_quantization", bits_down=8).reply(),
}
"""Codecs that keep back what they do not send."""
ALL: Mapping[str, Callable[[], SegmentCodec]] = {
    **KEEPING,
    "dgc": lambda: segment("dgc"),
    "dgc_nesterov": lambda: segment("dgc", nesterov=True),
    "qsgd_4": lambda: segment("qsgd", bits=4),
    "qsgd_7": lambda: segment("qsgd", bits=7),
    "qsgd_8": lambda: segment("qsgd", bits=8),
    "double_quantization_up": lambda: segment("double_quantization", bits_up=6),
}


def gradient(size: int, seed: int = 0) -> Tensor:
    """Makes a gradient with heavy tails, a region of zeros, and magnitudes that differ by place."""
    chance = np.random.default_rng([seed, size])
    values = chance.standard_t(3, size) * np.exp(np.sin(np.arange(size) / 700.0))
    values[size // 5 : size // 5 + size // 10] = 0.0
    return torch.tensor(values, dtype=torch.float32)


def kept(state: State, size: int) -> Tensor:
    """Returns what a state has kept back."""
    for name in ("residual", "accumulated"):
        if name in state:
            return state[name].clone()
    return torch.zeros(size)


def through(payload: Payload) -> Payload:
    """Sends a payload over the wire."""
    return wire.decode(bytes(wire.encode(payload)))


def decoded(codec: SegmentCodec, payloads: Sequence[Payload], offsets: Sequence[int]) -> Tensor:
    """Adds the payloads of one bucket to zeros."""
    out = torch.zeros(offsets[-1])
    for payload, (left, right) in zip(payloads, pairwise(offsets), strict=True):
        codec.add(through(payload), out[left:right])
    return out


def reduced(
    codec: LinearCodec, given: Sequence[Tensor], states: Sequence[State], matrices: Sequence[tuple[int, int, int]],
    round_: Callable[[int], Round], *, index: int = 0, calls: list[int] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Reduces a bucket over simulated ranks, one thread each, and makes states that are empty.

    `calls` gets the bytes of each sum.
    """
    barrier, given_now = threading.Barrier(len(given)), [torch.empty(0)] * len(given)

    def run(rank: int) -> Tensor:
        def all_reduce(tensor: Tensor) -> None:
            given_now[rank] = tensor.clone()
            barrier.wait(20)
            assert len({(each.shape, each.dtype) for each in given_now}) == 1
            total = given_now[0].clone()
            for other in given_now[1:]:
                total += other
            if not rank and calls is not None:
                calls.append(tensor.numel() * tensor.element_size())
            barrier.wait(20)
            tensor.copy_(total)

        flat = given[rank].clone()
        bucket = Bucket(index=index, flat=flat, matrices=matrices, offsets=[0, flat.numel()])
        if not states[rank]:
            states[rank].update(codec.new_state(bucket))
        codec.reduce(bucket, states[rank], all_reduce, round_(rank))
        return flat

    with ThreadPoolExecutor(len(given)) as threads:
        calls_ = [threads.submit(run, rank) for rank in range(len(given))]
    return [call.result() for call in calls_]


def varint(data: bytes, at: int) -> tuple[int, int]:
    """Reads one number of a Protocol Buffers message; returns it and where the next thing begins."""
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def fields(data: bytes) -> list[tuple[int, Any]]:
    """Reads the fields of a Protocol Buffers message."""
    at = 0
    found: list[tuple[int, Any]] = []
    while at < len(data):
        key, at = varint(data, at)
        value, at = varint(data, at)
        if key & 7 == 2:
            found.append((key >> 3, data[at : at + value]))
            at += value
        else:
            found.append((key >> 3, value))
    return found


def read(data: bytes) -> tuple[str, int, int, list[np.ndarray]]:
    """Reads the bytes of a payload: codec, version, elements and parts; bfloat16 becomes float32."""
    magic, checksum, length = struct.unpack_from("<4sII", data)
    assert (magic, checksum) == (b"FGX1", zlib.crc32(data[8:]))
    header = fields(data[12 : 12 + length])
    once = dict(header)
    at, parts = 12 + length, []
    for _, part in (each for each in header if each[0] == 4):
        numbers = dict(fields(part))
        kind, count = numbers[1], numbers.get(2, 0)
        raw = np.frombuffer(data, {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<f4"}[kind], count, at)
        at += raw.nbytes
        parts.append((raw.astype(np.uint32) << 16).view(np.float32) if kind == 4 else raw)
    assert at == len(data)
    return once[1].decode(), once[2], once.get(3, 0), parts


def integers(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Reads planes of bits; int8 are integers already."""
    if packed.dtype == np.int8:
        return packed.astype(np.int64)
    planes = np.unpackbits(packed.reshape(-1, bits, 1), axis=2, bitorder="little").astype(np.int64)
    whole = (planes << np.arange(bits)[None, :, None]).sum(axis=1).reshape(-1)[:count]
    return np.where(whole >= 1 << (bits - 1), whole - (1 << bits), whole)


def plainly_decoded(data: bytes, bits: int = 0) -> np.ndarray:
    """Decodes the bytes of a payload, float64; `bits` as the codec's settings have it."""
    _, _, size, parts = read(data)
    out = np.zeros(size)
    if len(parts) == 1:
        return parts[0].astype(np.float64)
    if len(parts) == 2:
        scales = np.repeat(parts[1], 512)[:size].astype(np.float64)
        return integers(parts[0], bits, size) * scales
    counts, indices = parts[:2]
    blocks = np.repeat(np.arange(len(counts)), counts)
    values = parts[2].astype(np.float64)
    if len(parts) == 4:
        whole = integers(parts[2], bits, len(indices))
        scales = np.zeros(len(counts))
        scales[counts > 0] = parts[3]
        values = (whole + (whole >= 0)) * scales[blocks]
    out[blocks * 4096 + indices] = values
    return out
