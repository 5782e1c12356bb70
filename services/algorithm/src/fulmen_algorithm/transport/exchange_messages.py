"""Between the messages of the exchange of gradients and the values of the aggregator."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen_algorithm.exchange.aggregator.effects import Answer, Chunk, RoundRecord
from fulmen_algorithm.exchange.aggregator.rounds import RoundMachine
from fulmen_algorithm.exchange.aggregator.terms import CHUNK_BYTES, SUM, CallTerms, Patience, Terms


def terms_of(message: pb.ExchangeTerms) -> Terms:
    """Decodes the terms of a rank."""
    return Terms(
        world_size=message.world_size,
        shard=message.shard,
        shard_count=message.shard_count,
        layout_digest=message.layout_digest,
        codec=message.codec,
        codec_version=message.codec_version,
        settings_json=message.codec_settings_json,
        segment_sizes=tuple(message.segment_sizes),
        patience=Patience(
            quorum=message.quorum,
            least_wait_s=message.least_wait_s,
            most_wait_s=message.most_wait_s,
            give_up_s=message.give_up_s,
            lease_s=message.lease_s,
        ),
    )


def terms(value: Terms) -> pb.ExchangeTerms:
    """Encodes the terms of a run."""
    return pb.ExchangeTerms(
        world_size=value.world_size,
        shard=value.shard,
        shard_count=value.shard_count,
        layout_digest=value.layout_digest,
        codec=value.codec,
        codec_version=value.codec_version,
        codec_settings_json=value.settings_json,
        segment_sizes=value.segment_sizes,
        quorum=value.patience.quorum,
        least_wait_s=value.patience.least_wait_s,
        most_wait_s=value.patience.most_wait_s,
        give_up_s=value.patience.give_up_s,
        lease_s=value.patience.lease_s,
    )


def chunk_of(message: pb.GradientChunk) -> Chunk:
    """Decodes a chunk of a payload."""
    settings = message.settings
    return Chunk(
        epoch=message.membership_epoch,
        key=(message.round, message.call),
        terms=CallTerms(
            bucket=message.bucket,
            codec=message.codec,
            codec_version=message.codec_version,
            number=settings.number,
            ratio=settings.ratio,
            seed=settings.seed,
            flush=settings.flush,
            total_bytes=message.total_bytes if message.codec == SUM else 0,
        ),
        offset=message.offset_bytes,
        total_bytes=message.total_bytes,
        data=message.data,
        crc32=message.crc32,
    )


def answer(value: Answer, *, epoch: int) -> Iterator[pb.ExchangeResponse]:
    """Encodes an answer: the verdict, and the chunks of the sum if there is one."""
    number, call = value.key
    done = value.done
    reply = memoryview(done.reply if done is not None else b"")
    verdict = pb.SegmentVerdict(
        round=number,
        call=call,
        verdict=pb.SegmentVerdict.Verdict.Value(f"VERDICT_{value.verdict}"),
        text=value.text,
        offset_bytes=value.offset,
        membership_epoch=epoch,
        ranks=sorted(done.taken) if done is not None else (),
        member_count=done.member_count if done is not None else 0,
        reply_bytes=len(reply),
    )
    yield pb.ExchangeResponse(verdict=verdict)
    for begin in range(0, len(reply), CHUNK_BYTES):
        data = bytes(reply[begin : begin + CHUNK_BYTES])
        yield pb.ExchangeResponse(
            chunk=pb.GradientChunk(
                membership_epoch=epoch,
                round=number,
                call=call,
                offset_bytes=begin,
                total_bytes=len(reply),
                data=data,
                crc32=zlib.crc32(data),
            )
        )


def round_(record: RoundRecord) -> pb.GetRoundResponse:
    """Encodes how a round went."""
    return pb.GetRoundResponse(
        ranks=sorted(record.ranks),
        raw_bytes=record.raw_bytes,
        sent_bytes=record.sent_bytes // max(1, len(record.ranks)),
        reply_bytes=record.reply_bytes,
        late_ranks=sorted(record.late),
        duration_s=max(0.0, record.ended_s - record.began_s),
    )


def status(machine: RoundMachine, *, lost_residuals: int, now_s: float) -> pb.ShardStatus:
    """Encodes how a shard stands."""
    totals = machine.totals
    return pb.ShardStatus(
        terms=terms(machine.terms),
        membership_epoch=machine.members.epoch,
        round=machine.round,
        members=[
            pb.ExchangeMember(
                rank=member.rank,
                first_round=member.first_round,
                round=member.position[0],
                late_count=member.late,
                silent_s=max(0.0, now_s - member.seen_s),
            )
            for member in machine.members.all()
        ],
        received_bytes=totals.received_bytes,
        sent_bytes=totals.sent_bytes,
        ratio=totals.raw_bytes / totals.received_bytes if totals.received_bytes else 1.0,
        sum_count=totals.sums,
        partial_sum_count=totals.partial_sums,
        bad_checksum_count=totals.bad_checksums,
        removed_member_count=machine.removed,
        lost_residual_count=lost_residuals,
        wait_s=machine.arrivals.deadline_s(),
    )
