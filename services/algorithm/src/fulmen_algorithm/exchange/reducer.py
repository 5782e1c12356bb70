"""The gradients of ranks, summed through a codec: what `training.parallel.GradientReducer` asks for.

Invariants: every rank has the same bits afterwards, and what is decided (to leave a round out, to send everything) is
decided from numbers that all ranks have. A gradient that is not finite on any rank goes into no state: the step is
skipped by all, as it would be without a codec. A parameter without gradient on any rank keeps none, unless something of
it that was kept back is sent now.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter

import torch
from torch import Tensor, nn

from fulmen_algorithm.exchange.codec import Bucket, Codec, Round, SegmentCodec, State
from fulmen_algorithm.exchange.layout import Layout
from fulmen_algorithm.exchange.link import Link
from fulmen_algorithm.exchange.settings import CodecSettings
from fulmen_algorithm.training.parallel import Ranks
from fulmen_algorithm.training.tensor_files import content_of
from fulmen_algorithm.training.weight_writer import raw_tensor


class RanksDiverged(Exception):
    """Ranks that must hold the same weights do not; the text says in which round that was seen."""


@dataclass(slots=True)
class Spent:
    """What exchanges have cost since it was last asked: seconds by what they went into, and bytes."""

    raw_bytes: float = 0.0
    encode_s: float = 0.0
    transfer_s: float = 0.0
    decode_s: float = 0.0

    def figures(self, *, sent: float, received: float) -> dict[str, float]:
        """Names the figures as a run's stream shows them."""
        return {
            "exchange_raw_bytes": self.raw_bytes,
            "exchange_sent_bytes": sent,
            "exchange_received_bytes": received,
            "exchange_ratio": self.raw_bytes / sent if sent else 1.0,
            "exchange_encode_seconds": self.encode_s,
            "exchange_transfer_seconds": self.transfer_s,
            "exchange_decode_seconds": self.decode_s,
        }


@dataclass(slots=True, kw_only=True)
class CodecReducer:
    """Sums gradients through a codec.

    Attributes:
        settings: Of the codec.
        codec: It.
        link: What carries its payloads.
        layout: Where each parameter lies.
        seed: Of what is random.
        ratio_at: The ratio of a round.
    """

    settings: CodecSettings
    codec: Codec
    link: Link
    layout: Layout
    seed: int
    ratio_at: Callable[[int], float]
    parameters: Mapping[str, nn.Parameter]
    round_number: int = 0
    states: dict[int, State] = field(default_factory=dict)
    _spent: Spent = field(default_factory=Spent)
    _counted: tuple[int, int] = (0, 0)

    def reduce(self, parameters: Sequence[nn.Parameter], ranks: Ranks) -> None:
        """See `GradientReducer`.

        Raises:
            RanksDiverged: if the ranks do not hold the same weights any more.
        """
        self.link.begin()
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        finite, present = self._ask_all(gradients)
        if not finite:
            # Every rank skips the step over this; nothing was put into a state.
            for gradient in gradients.values():
                gradient.fill_(float("nan"))
            return
        self.round_number += 1
        self._check_weights()
        self._clip(gradients)
        every = self.settings.full_sync_every
        round_ = Round(
            number=self.round_number,
            world_size=self.link.size,
            ratio=self.ratio_at(self.round_number),
            rank=self.link.rank,
            seed=self.seed,
            flush=bool(every) and self.round_number % every == 0,
        )
        self._sum_dense(present)
        for index in range(len(self.layout.buckets)):
            self._sum_bucket(index, gradients, present, round_)

    def take_figures(self) -> dict[str, float]:
        """Returns what exchanges have cost since it was last asked."""
        sent, received = self.link.sent_bytes - self._counted[0], self.link.received_bytes - self._counted[1]
        self._counted = (self.link.sent_bytes, self.link.received_bytes)
        spent, self._spent = self._spent, Spent()
        return spent.figures(sent=sent, received=received)

    def _ask_all(self, gradients: Mapping[str, Tensor]) -> tuple[bool, set[str]]:
        """Tells whether the gradients of all ranks are finite, and which parameters have one on any rank."""
        device = next(iter(self.parameters.values())).device
        counts = torch.tensor([0.0, *(float(name in gradients) for name in self.parameters)], device=device)
        for gradient in gradients.values():
            counts[0] += 1.0 - gradient.isfinite().all().float()
        self.link.all_reduce(counts)
        bad, *having = counts.tolist()
        return not bad, {name for name, count in zip(self.parameters, having, strict=True) if count}

    def _clip(self, gradients: Mapping[str, Tensor]) -> None:
        """Scales this rank's gradients down where the codec accumulates them: a sum of what came in bursts is not clipped."""
        limit = self.codec.local_clip if isinstance(self.codec, SegmentCodec) else None
        if limit is None or not gradients:
            return
        norm = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()])))
        if norm > limit / self.link.size**0.5:
            for gradient in gradients.values():
                gradient.mul_(limit / self.link.size**0.5 / norm)

    def _check_weights(self) -> None:
        """Compares a digest of the weights with that of the other ranks, every so many rounds."""
        every = self.settings.check_every
        if not every or self.round_number % every:
            return
        digest = hashlib.sha256()
        for parameter in self.parameters.values():
            digest.update(content_of(raw_tensor(parameter).words))
        device = next(iter(self.parameters.values())).device
        own = torch.tensor(list(digest.digest()[:16]), dtype=torch.float32, device=device)
        sum_ = own.clone()
        self.link.all_reduce(sum_)
        if not torch.equal(sum_, own * self.link.size):
            raise RanksDiverged(f"the ranks hold different weights in round {self.round_number}")

    def _sum_dense(self, present: set[str]) -> None:
        """Sums what is not compressed, all at once."""
        parameters = [self.parameters[name] for name in self.layout.dense if name in present]
        if not parameters:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.flatten().float() for p in parameters if p.grad is not None])
        began = perf_counter()
        self.link.all_reduce(flat)
        self._spent.transfer_s += perf_counter() - began
        self._spent.raw_bytes += flat.numel() * 4
        for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            parameter.grad.copy_(part.view_as(parameter))  # type: ignore[union-attr]  # made above

    def _sum_bucket(self, index: int, gradients: dict[str, Tensor], present: set[str], round_: Round) -> None:
        began = perf_counter()
        like = self.parameters[self.layout.buckets[index][0].name]
        bucket = self.layout.bucket(index, gradients, like=like)
        self._spent.raw_bytes += bucket.flat.numel() * 4
        if isinstance(self.codec, SegmentCodec):
            self._exchange(self.codec, bucket, round_, began)
        else:
            if index not in self.states:
                self.states[index] = self.codec.new_state(bucket)
            self.codec.reduce(bucket, self.states[index], self.link.all_reduce, round_)
            self._spent.transfer_s += perf_counter() - began
        for place in self.layout.buckets[index]:
            parameter, sum_ = self.parameters[place.name], bucket.flat[place.begin : place.end]
            if place.name not in present and not bool(sum_.any()):
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(sum_.view_as(parameter))

    def _exchange(self, codec: SegmentCodec, bucket: Bucket, round_: Round, began: float) -> None:
        state = self.states.get(bucket.index)
        if state is None:
            state = self.states[bucket.index] = codec.new_state(bucket.flat)
        payloads = codec.encode(bucket.flat, state, bucket.cuts, round_)
        encoded = perf_counter()
        replies, accepted = self.link.exchange(bucket.index, payloads, round_)
        moved = perf_counter()
        for payload, (begin, _), taken in zip(payloads, pairwise(bucket.cuts), accepted, strict=True):
            if not taken:
                codec.credit(payload, state, begin)
        bucket.flat.zero_()
        back = codec.reply()
        for reply, (left, right) in zip(replies, pairwise(bucket.cuts), strict=True):
            back.add(reply, bucket.flat[left:right])
        self._spent.encode_s += encoded - began
        self._spent.transfer_s += moved - encoded
        self._spent.decode_s += perf_counter() - moved
