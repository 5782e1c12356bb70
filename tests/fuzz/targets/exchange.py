"""Messages of the gradient exchange: joins, chunks, payloads of every codec. A line names the codec, then come parts:
a payload, terms, and any number of chunks."""

from __future__ import annotations

import contextlib
import random

import torch
from google.protobuf.message import DecodeError

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen_exchange import wire
from fulmen_exchange.aggregator.checksum import crc32
from fulmen_exchange.aggregator.effects import StagingFull
from fulmen_exchange.aggregator.rounds import RoundMachine
from fulmen_exchange.aggregator.terms import StragglerPolicy, Terms
from fulmen_exchange.codecs.codec import PayloadInvalid, Round
from fulmen_exchange.links.grpc_chunks import ReadChunk, read
from fulmen_exchange.server.messages import answer, chunk_of, terms, terms_of
from tests.fuzz.mutation import decoded, framed, mutate_bytes, mutate_message, unframed
from tests.fuzz.target import PureTarget, check_text
from tests.support.exchange.codec_cases import ALL

SIZE = 5000
_CODECS = {name: make() for name, make in ALL.items()}
_TERMS = Terms(
    world_size=2, shard=0, shard_count=1, layout_digest="d", codec="topk", codec_version=1, settings_json="{}",
    segment_sizes=(SIZE,), patience=StragglerPolicy(),
)  # fmt: skip
_LIMIT = 1 << 20

torch.set_num_threads(1)


def run(data: bytes) -> None:
    """Adds a payload to a sum, compares terms, and gives chunks to a shard."""
    head, parts = unframed(data)
    payload, packed_terms, *chunks = [*parts, b"", b""]
    with contextlib.suppress(PayloadInvalid):
        _add(head, payload)
    theirs = terms_of(decoded(pb.ExchangeTerms, packed_terms))
    problems = theirs.problems(max_elements=10**7) or _TERMS.differences(theirs)
    for problem in problems:
        check_text(f"{problem.field} {problem.description}")
    if not theirs.problems(max_elements=10**7):
        terms(theirs)
    machine = RoundMachine(_TERMS, room=lambda: _LIMIT)
    for rank in range(2):
        machine.join(rank, "i", 0.0)
    for number, each in enumerate(chunks):
        with contextlib.suppress(DecodeError, StagingFull):
            message = read(pb.ExchangeRequest, each)
            if isinstance(message, ReadChunk):
                for effect in machine.take(number % 2, "i", chunk_of(message), number / 10):
                    if hasattr(effect, "status"):
                        list(answer(effect, epoch=1))
    machine.tick(1e6)


def _add(name: str, data: bytes) -> None:
    """Adds a payload as if its checksum were right, so that the codec sees it; a refused one adds nothing."""
    stored = int.from_bytes(data[4:8], "little")
    payload = wire.decode(data, checksum=stored)
    codec = _CODECS.get(name) or _CODECS["topk"]
    out = torch.zeros(SIZE)
    try:
        codec.add(payload, out)
    except PayloadInvalid:
        assert not out.any()
        raise
    assert out.isfinite().all()


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes one part: its header or bytes, its fields, or the codec that reads it."""
    head, parts = unframed(data)
    if rng.random() < 0.05 or not parts:
        return framed(rng.choice(list(_CODECS)), *(parts or [b""]))
    place = rng.choice((0, 0, rng.randrange(len(parts))))
    if rng.random() < 0.4:
        parts[place] = mutate_bytes(parts[place], rng)
    elif place == 0:
        parts[0] = _mutate_payload(parts[0], rng)
    else:
        message = decoded(pb.ExchangeTerms if place == 1 else pb.ExchangeRequest, parts[place])
        mutate_message(message, rng, ("topk", "sum", "d", "{}"))
        if isinstance(message, pb.ExchangeRequest) and message.HasField("chunk") and rng.random() < 0.7:
            message.chunk.crc32 = crc32(memoryview(message.chunk.data))
        parts[place] = message.SerializeToString()
    return framed(head, *parts)


def _mutate_payload(data: bytes, rng: random.Random) -> bytes:
    """Changes the header of a payload, and keeps its length right."""
    begin = wire.parts_begin(data)
    header = decoded(wire.PayloadHeader, data[12:begin])
    mutate_message(header, rng, ("topk", "dgc", "qsgd"))
    packed = header.SerializeToString()
    return data[:8] + len(packed).to_bytes(4, "little") + packed + data[begin:]


def _seeds() -> list[bytes]:
    found = []
    packed_terms = terms(_TERMS)
    packed_terms.segment_sizes.append(SIZE)
    for name, codec in _CODECS.items():
        like = torch.randn(SIZE, generator=torch.Generator().manual_seed(1))
        round_ = Round(number=1, world_size=2, ratio=50.0)
        [payload] = codec.encode(like.clone(), codec.new_state(like), [0, SIZE], round_)
        data = bytes(wire.encode(payload))
        chunk = pb.GradientChunk(
            membership_epoch=1, round=1, codec="topk", codec_version=1, total_bytes=len(data), data=data, crc32=crc32(memoryview(data)),
            settings=pb.CallSettings(number=1, ratio=50),
        )  # fmt: skip
        messages = [pb.ExchangeRequest(chunk=chunk).SerializeToString()] * 2
        found.append(framed(name, data, packed_terms.SerializeToString(), *messages))
    return found


TARGET = PureTarget(run=run, seeds=_seeds(), mutate=mutate)
