"""Sums the payloads of one shard, and stores the sums in files so that a restart loses nothing.

Invariant: a sum is in its file before any rank gets it. A shard's residual is restored only as of the newest sum that a rank
may have; otherwise it is lost, and the loss is counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import ValidationError

from fulmen.algorithm.v1 import gradient_exchange_service_pb2 as pb
from fulmen_exchange import wire
from fulmen_exchange.aggregator.checksum import LONG, crc32
from fulmen_exchange.aggregator.effects import CompletedSum, Reply, SumDue
from fulmen_exchange.aggregator.folders import make_folder
from fulmen_exchange.aggregator.membership import Key
from fulmen_exchange.aggregator.shard import Shard
from fulmen_exchange.aggregator.sum_files import BUCKET, SumFiles
from fulmen_exchange.aggregator.terms import MAX_RANKS, SUM, CallTerms, Problem, Terms
from fulmen_exchange.codecs.codec import Payload, PayloadInvalid, Round, SegmentCodec
from fulmen_exchange.links.grpc_chunks import ChunkedPayload, split, split_bytes
from fulmen_exchange.registry import load_codecs

SUM_VERSION = 1


class TermsRefused(Exception):
    """No codec can be built for the terms of a run."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{problem.field}: {problem.description}" for problem in problems))
        self.problems = problems


class PayloadsRefused(Exception):
    """Payloads cannot be summed; reasons by rank."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__(str(dict(reasons)))
        self.reasons = reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What a shard resumes from.

    Attributes:
        sums: Stored sums; empty if unusable.
        epoch: Epoch of the membership at that time.
        history: Identifier of the exchange; empty if newer sums may exist.
        has_lost: Whether a residual is lost.
    """

    sums: Mapping[Key, tuple[CallTerms, CompletedSum]] = field(default_factory=dict, repr=False)
    epoch: int = 0
    history: str = ""
    has_lost: bool = False


def sum_payload(tensor: torch.Tensor) -> Payload:
    """Wraps a flat tensor, [n], to be summed uncompressed; its type must have a wire format."""
    return Payload(codec=SUM, version=SUM_VERSION, size=tensor.numel(), parts=(tensor,))


class ShardSum:
    """The sums of one shard of one run; not thread-safe.

    Attributes:
        agreed_bytes: Memory of the sums and residuals of all segments, as the terms say.
    """

    def __init__(self, terms: Terms, *, folder: Path | None = None, is_synced: bool = True) -> None:
        """Builds the codec.

        Args:
            terms: Terms of the run.
            folder: Folder of the stored sums; None to store none.
            is_synced: See `SumFiles`.

        Raises:
            TermsRefused: if the codec is unknown or its settings are invalid.
        """
        self._terms = terms
        self._codec = _codec_of(terms)
        self._shard = None if self._codec is None else Shard(self._codec)
        tensors = 0 if self._codec is None else 1 + len(self._codec.reply().new_state(torch.zeros(1)))
        self.agreed_bytes = 4 * tensors * sum(terms.segment_sizes)
        self._files = None if folder is None else SumFiles(folder, terms, is_synced)
        if folder is not None:
            make_folder(folder, is_synced=is_synced)
        crc32(bytes(LONG))  # loads the kernels here instead of while chunks wait

    @property
    def overflowed(self) -> int:
        """Number of elements that were left out of sums because they overflowed."""
        return 0 if self._shard is None else self._shard.overflowed

    @property
    def keeps_state(self) -> bool:
        """Whether the shard has a residual."""
        return self._codec is not None and bool(self._codec.reply().new_state(torch.zeros(1)))

    def reduce(self, due: SumDue, *, epoch: int, history: str) -> Reply:
        """Returns the encoded sum of payloads, whose bytes may be overwritten.

        Raises:
            PayloadsRefused: if some are malformed; nothing is changed then.
        """
        payloads, reasons = self._decoded(due)
        if reasons:
            raise PayloadsRefused(reasons)
        in_order = list(payloads.values())
        sum_ = _plain_sum(in_order) if due.terms.is_plain else self._coded_sum(due, payloads)
        reply = _reply(split(wire.front_of(sum_), wire.parts_of(sum_)), due.key, epoch)
        if self._files is not None:
            keeps = self._shard is not None and not due.terms.is_plain
            state = self._shard.states[due.terms.bucket] if self._shard is not None and keeps else {}
            self._files.write(due, reply, state, epoch=epoch, history=history)
        return reply

    def restore(self, *, at_least: int, known: int = 0, history: str = "") -> Restored:
        """Reads the stored sums, unless they belong to other terms, are damaged or are older than those of the ranks.

        Args:
            at_least: Oldest useful round.
            known: Number of members that the asking rank knew; 0 if it was not a member.
            history: Identifier of the exchange that it was part of; empty for none.
        """
        stored, bad = self._files.read() if self._files is not None else ([], [])
        newest = max((each.key for each in stored), default=(0, 0))
        last = {each.history for each in stored if each.key == newest}
        if not stored or newest[0] < at_least or (history and history not in last):
            return Restored(has_lost=self.keeps_state and (bool(known) or any(name.startswith(BUCKET) for name in bad)))
        states: dict[int, Key] = {}
        for each in stored:
            bucket = each.terms.bucket
            if self._shard is not None and not each.terms.is_plain and each.key > states.get(bucket, (0, 0)):
                states[bucket] = each.key
                self._shard.states[bucket] = each.state
        sums = {
            each.key: (
                each.terms,
                CompletedSum(
                    contributors=each.contributors,
                    member_count=each.member_count,
                    reply=_reply(split_bytes(each.data), each.key, each.epoch),
                ),
            )
            for each in stored
            if each.key[0] >= newest[0] - 1
        }
        return Restored(
            sums=sums,
            epoch=max(each.epoch for each in stored),
            # An unreadable file may have been newer than all of these.
            history="" if bad else last.pop(),
            has_lost=self.keeps_state and any(name.startswith(BUCKET) for name in bad),
        )

    def _decoded(self, due: SumDue) -> tuple[dict[int, Payload], dict[int, str]]:
        payloads: dict[int, Payload] = {}
        reasons: dict[int, str] = {}
        kinds: dict[tuple[torch.dtype, int], int] = {}
        for rank, staged in due.payloads.items():
            try:
                payload = payloads[rank] = wire.decode(staged.data, checksum=staged.checksum, copies=False)
                if not due.terms.is_plain:
                    size = self._terms.segment_sizes[due.terms.bucket]
                    if payload.size != size:
                        raise PayloadInvalid(f"the segment has {size} elements, the payload {payload.size}")
                    continue
                kinds.setdefault(_kind_of(payload), rank)
                if len(kinds) > 1:
                    raise PayloadInvalid(f"rank {min(kinds.values())} sent a tensor of another type or size")
            except PayloadInvalid as error:
                reasons[rank] = str(error)
        return payloads, reasons

    def _coded_sum(self, due: SumDue, payloads: Mapping[int, Payload]) -> Payload:
        shard, codec, terms = self._shard, self._codec, due.terms
        assert shard is not None
        assert codec is not None
        round_ = Round(
            number=terms.number,
            world_size=due.member_count,
            ratio=terms.ratio,
            rank=MAX_RANKS + self._terms.shard,  # beyond all ranks, so random numbers differ from any rank's
            seed=terms.seed,
            flush=terms.flush,
            bucket=terms.bucket,
        )
        try:
            return shard.reduce(terms.bucket, list(payloads.values()), round_)
        except PayloadInvalid:
            reasons = {}
            for rank, payload in payloads.items():
                try:
                    codec.add(payload, torch.zeros(payload.size))
                except PayloadInvalid as error:
                    reasons[rank] = str(error)
            if not reasons:
                raise
            raise PayloadsRefused(reasons) from None


def _codec_of(terms: Terms) -> SegmentCodec | None:
    entry = load_codecs().get(terms.codec)
    if entry is None:
        known = ", ".join(sorted(load_codecs()))
        raise TermsRefused(
            [Problem(field="codec", description=f"{terms.codec[:64]!r} is unknown here; known: {known}")]
        )
    try:
        codec = entry.make(entry.settings.model_validate_json(terms.settings_json))
    except ValidationError as error:
        raise TermsRefused(
            [
                Problem(field=".".join(map(str, ("codec_settings", *item["loc"]))), description=item["msg"])
                for item in error.errors(include_input=False, include_url=False)
            ]
        ) from None
    if codec.version != terms.codec_version:
        problem = f"the server has version {codec.version} of {terms.codec}, this rank {terms.codec_version}"
        raise TermsRefused([Problem(field="codec_version", description=problem)])
    return codec if isinstance(codec, SegmentCodec) else None


def _kind_of(payload: Payload) -> tuple[torch.dtype, int]:
    if (payload.codec, payload.version, len(payload.parts)) != (SUM, SUM_VERSION, 1):
        raise PayloadInvalid(f"not a payload of {SUM} version {SUM_VERSION}")
    [part] = payload.parts
    if part.numel() != payload.size:
        raise PayloadInvalid("an uncompressed tensor must have one part of its size")
    return part.dtype, part.numel()


def _plain_sum(payloads: list[Payload]) -> Payload:
    """Sums in float32 in the order of the ranks and rounds once; integers wrap around."""
    [first], *others = (payload.parts for payload in payloads)
    wide = torch.float32 if first.is_floating_point() else torch.int32
    sum_ = first.to(wide)  # in place for float32: the first payload is not needed afterwards
    for [other] in others:
        sum_ += other
    return sum_payload(sum_.to(first.dtype))


def _reply(payload: ChunkedPayload, key: Key, epoch: int) -> Reply:
    head = pb.GradientChunk(membership_epoch=epoch, round=key[0], call=key[1])
    messages = tuple(payload.message(head, number) for number in range(len(payload.pieces)))
    return Reply(size=payload.size, messages=messages)
