"""Conversions between protobuf messages and the aggregator's values."""

from __future__ import annotations

from collections.abc import Iterator

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen_exchange.aggregator.effects import Chunk, JoinResult, Response, ResumePoint, RoundRecord
from fulmen_exchange.aggregator.rounds import RoundMachine
from fulmen_exchange.aggregator.terms import QUORUM_SUM, SUM, CallTerms, StragglerPolicy, Terms
from fulmen_exchange.links.grpc_chunks import ReadChunk

MAX_TEXT = 1000


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
        patience=StragglerPolicy(
            quorum=message.quorum,
            min_wait_s=message.min_wait_s,
            max_wait_s=message.max_wait_s,
            straggler_timeout_s=message.straggler_timeout_s,
            lease_s=message.lease_s,
        ),
    )


def terms(value: Terms) -> pb.ExchangeTerms:
    """Encodes the terms of a run, without the sizes of its segments, which may be many."""
    return pb.ExchangeTerms(
        world_size=value.world_size,
        shard=value.shard,
        shard_count=value.shard_count,
        layout_digest=value.layout_digest,
        codec=value.codec,
        codec_version=value.codec_version,
        codec_settings_json=value.settings_json,
        quorum=value.patience.quorum,
        min_wait_s=value.patience.min_wait_s,
        max_wait_s=value.patience.max_wait_s,
        straggler_timeout_s=value.patience.straggler_timeout_s,
        lease_s=value.patience.lease_s,
    )


def resume_point_of(message: pb.JoinRequest) -> ResumePoint:
    """Decodes the resume point of a joining rank."""
    return ResumePoint(
        round=max(0, message.round),
        call=max(0, message.call),
        epoch=max(0, message.membership_epoch),
        known=max(0, message.known_member_count),
        history=message.history,
    )


def joined(value: JoinResult) -> pb.JoinResponse:
    """Encodes the result of a join."""
    return pb.JoinResponse(
        membership_epoch=value.epoch,
        member_count=len(value.ranks),
        ranks=value.ranks,
        round=value.round,
        first_round=value.first_round,
        history=value.history,
    )


def chunk_of(message: ReadChunk) -> Chunk:
    """Decodes a chunk of a payload."""
    head, settings = message.head, message.head.settings
    return Chunk(
        epoch=head.membership_epoch,
        key=(head.round, head.call),
        terms=CallTerms(
            bucket=head.bucket,
            codec=head.codec,
            codec_version=head.codec_version,
            number=settings.number,
            ratio=settings.ratio,
            seed=settings.seed,
            flush=settings.flush,
            total_bytes=head.total_bytes if head.codec in (SUM, QUORUM_SUM) else 0,
        ),
        offset=head.offset_bytes,
        total_bytes=head.total_bytes,
        data=message.data,
        crc32=head.crc32,
    )


def answer(value: Response, *, epoch: int) -> Iterator[bytes | pb.ExchangeResponse]:
    """Encodes a response: the status, then the chunks of the sum, if any."""
    number, call = value.key
    done = value.done
    yield pb.ExchangeResponse(
        status=pb.SegmentStatus(
            round=number,
            call=call,
            status=pb.SegmentStatus.Status.Value(f"STATUS_{value.status}"),
            text=value.text[:MAX_TEXT],
            offset_bytes=value.offset,
            membership_epoch=epoch,
            ranks=sorted(done.contributors) if done is not None else (),
            member_count=done.member_count if done is not None else 0,
            reply_bytes=done.reply.size if done is not None else 0,
        )
    )
    if done is not None:
        yield from done.reply.messages


def round_(record: RoundRecord) -> pb.GetRoundResponse:
    """Encodes the statistics of a round."""
    return pb.GetRoundResponse(
        ranks=sorted(record.ranks),
        raw_bytes=record.raw_bytes,
        sent_bytes=record.sent_bytes // max(1, len(record.ranks)),
        reply_bytes=record.reply_bytes,
        late_ranks=sorted(record.late),
        duration_s=max(0.0, record.ended_s - record.began_s),
    )


def status(machine: RoundMachine, *, lost_residuals: int, now_s: float) -> pb.ShardStatus:
    """Encodes the status of a shard."""
    totals = machine.totals
    moved = totals.received_bytes + totals.sent_bytes
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
                idle_s=max(0.0, now_s - member.seen_s),
            )
            for member in machine.members.all()
        ],
        received_bytes=totals.received_bytes,
        sent_bytes=totals.sent_bytes,
        ratio=2.0 * totals.raw_bytes / moved if moved else 1.0,
        sum_count=totals.sums,
        partial_sum_count=totals.partial_sums,
        bad_checksum_count=totals.bad_checksums,
        removed_member_count=machine.removed,
        lost_residual_count=lost_residuals,
        wait_s=machine.arrivals.deadline_s(),
    )
