"""Sums buckets round by round, each round through one codec, and holds the codecs' states.

Invariants: uncompressed parameters form one more bucket. If a round bypasses the configured codec, its residual is added to
the gradients, and if it holds the optimiser's momentum they pass through that: neither gradient nor momentum is lost,
whatever codec carries a round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from fulmen_exchange.codec_memory import Before, CodecMemory
from fulmen_exchange.codecs.codec import Bucket, Codec, LinearCodec, Payload, Round, SegmentCodec, State
from fulmen_exchange.layout import Layout, ParameterSpan, fill
from fulmen_exchange.links.link import Link
from fulmen_exchange.metrics import Energy, RoundCosts
from fulmen_exchange.policies.decision import CodecChoice, CodecKey
from fulmen_exchange.policies.policy import own_choice
from fulmen_exchange.registry import load_codecs, make_codec
from fulmen_exchange.residuals import (
    ParameterSlices,
    ParameterTensors,
    ResidualsInvalid,
    assign,
    digest_of,
    merge_finite,
    split,
)
from fulmen_exchange.settings import CodecSettings

WAVE_BYTES = 8 * 2**20
"""Approximate bytes of payloads exchanged at a time: large enough to amortise latency, small enough to save memory."""
LATE = "late"
"""Name, besides those of codecs in a stored state, of data that was sent too late and that no codec keeps."""


class BucketSums:
    """The sums of one rank.

    Attributes:
        compressed: Number of elements that are compressed.
        codec_memories: State of every codec used so far.
    """

    def __init__(self, settings: CodecSettings, *, parameters: Mapping[str, nn.Parameter], link: Link) -> None:
        """Lays out the parameters.

        Args:
            settings: Settings of the codec.
            parameters: Trainable parameters by name, the same on every rank and in the same order.
            link: Link to the other ranks.
        """
        self._settings = settings
        self._parameters = parameters
        self._link = link
        self._own = own_choice(settings).key
        self._layout = Layout.of(list(parameters.items()), settings, shards=link.shards)
        self._places = [*self._layout.buckets, _consecutive(self._layout.dense, parameters)]
        self.compressed = sum(map(_size_of, self._layout.buckets))
        self._begins = list(accumulate(map(_size_of, self._places), initial=0))
        [like, *_] = parameters.values()
        # Reused in every round, as DDP reuses its buckets: allocation costs more than arithmetic.
        self._flat = torch.empty(self._begins[-1], dtype=torch.float32, device=like.device)
        self._costs = RoundCosts()
        self._lapped = 0.0
        # By bucket, what this rank sent too late and no codec keeps: it is added in the next round.
        self._late: dict[int, Tensor] = {}
        self.codec_memories = {self._own: CodecMemory(codec=make_codec(settings))}
        self._running = self.codec_memories[self._own]
        self._before = Before()

    def forget(self) -> None:
        """Resets all states."""
        self._late.clear()
        self._before.clear()
        for memory in self.codec_memories.values():
            if memory.shard is not None:
                memory.shard.states.clear()
        self.codec_memories = {key: CodecMemory(codec=memory.codec) for key, memory in self.codec_memories.items()}
        self._running = self.codec_memories[self._own]

    @property
    def local_clip(self) -> float | None:
        """Norm, over the square root of the number of ranks, to which own gradients are clipped; None if the sum is clipped."""
        return self.codec_memories[self._own].codec.local_clip

    def supports(self, choice: CodecChoice) -> bool:
        """Returns whether the link can carry a choice."""
        codec = self._memory(choice.key).codec
        return choice.key == self._own or isinstance(codec, LinearCodec) or self._link.supports(codec)

    def sum(
        self,
        tensors: dict[str, Tensor],
        choice: CodecChoice,
        round_: Round,
        *,
        present: frozenset[str],
        energy: Energy | None,
    ) -> RoundCosts:
        """Replaces tensors by their sums over the ranks; returns the costs.

        Args:
            tensors: Gradients by parameter name. The sums share memory that the next call overwrites. Sums of gradients that only
                other ranks have, and residuals, are added; parameters without any gradient are absent.
            choice: Codec of the round, the same on every rank.
            round_: The round.
            present: Parameters with a gradient on any rank.
            energy: Collects compression statistics, if wanted.
        """
        self.begin(choice)
        memory = self._running
        if isinstance(memory.codec, SegmentCodec):
            for wave in self._waves(choice, round_):
                self._exchange(memory, memory.codec, wave, tensors, round_, energy)
        else:
            for index in range(len(self._layout.buckets)):
                self._reduce(memory, memory.codec, self._filled(index, tensors, memory), round_, energy)
        return self.finish(tensors, present)

    def begin(self, choice: CodecChoice) -> None:
        """Begins a round whose buckets come one after another; see `sum`."""
        self._running = self._memory(choice.key)
        self._costs = RoundCosts(rounds=1)
        self._lap(None)
        if isinstance(self._running.codec, SegmentCodec):
            self._running.shard = self._link.use(self._running.codec)

    def add(self, index: int, tensors: Mapping[str, Tensor], round_: Round, energy: Energy | None) -> None:
        """Sums one bucket, whose states `undo` can return to what they are now."""
        memory = self._running
        self._lap(None)
        self._before.keep(index, {id(each): each for each in (memory, self.codec_memories[self._own])}.values())
        if isinstance(memory.codec, SegmentCodec):
            self._exchange(memory, memory.codec, [index], tensors, round_, energy)
        else:
            self._reduce(memory, memory.codec, self._filled(index, tensors, memory), round_, energy)
            self._lap("decode_s")

    def finish(self, tensors: dict[str, Tensor], present: frozenset[str]) -> RoundCosts:
        """Sums what is not compressed, and replaces the tensors; see `sum`."""
        self._before.forget()
        if self._places[-1]:
            self._sum_uncompressed(self._filled(len(self._layout.buckets), tensors, None))
        self._write_back(tensors, present)
        self._lap("decode_s")
        self._costs.raw_bytes += self._flat.numel() * 4
        return self._costs

    def undo(self) -> None:
        """Returns the states of all buckets added since `begin` to what they were: the round never was."""
        self._before.undo()

    @property
    def names_of_buckets(self) -> list[frozenset[str]]:
        """Names of the parameters in each bucket that is compressed."""
        return [frozenset(place.name for place in places) for places in self._layout.buckets]

    def _bucket(self, index: int) -> Bucket:
        """Returns a view of a bucket."""
        begin, end = self._begins[index], self._begins[index + 1]
        flat = self._flat[begin:end]
        if index == len(self._layout.buckets):
            return Bucket(index=index, flat=flat, matrices=(), offsets=(0, flat.numel()))
        matrices = [(place.begin, place.rows, place.columns) for place in self._places[index]]
        return Bucket(index=index, flat=flat, matrices=matrices, offsets=self._layout.offsets_of(index))

    def _filled(self, index: int, tensors: Mapping[str, Tensor], carrier: CodecMemory | None) -> Bucket:
        """Fills a bucket with gradients, plus the configured codec's residual if another codec carries them."""
        bucket, own = self._bucket(index), self.codec_memories[self._own]
        put = None
        if carrier is not own and self._settings.holds_momentum:
            put = partial(own.codec.correct, _state_of(own, bucket))
        fill(bucket.flat, self._places[index], tensors, put)
        if carrier is not own and index in own.dirty:
            own.codec.release(bucket.flat, own.states[index])
            own.dirty.remove(index)
        if index in self._late:
            bucket.flat.add_(self._late.pop(index))
        return bucket

    def _sum_uncompressed(self, bucket: Bucket) -> None:
        self._lap("encode_s")
        own = bucket.flat.clone()
        for part in self._link.sum_quorum(bucket.flat):
            if not part.accepted:
                self._late_of(bucket)[part.begin : part.end] += own[part.begin : part.end]
            _scale(bucket.flat[part.begin : part.end], part.factor)
        self._lap("transfer_s")

    def _late_of(self, bucket: Bucket) -> Tensor:
        return self._late.setdefault(bucket.index, torch.zeros_like(bucket.flat))

    def _reduce(
        self, memory: CodecMemory, codec: LinearCodec, bucket: Bucket, round_: Round, energy: Energy | None
    ) -> None:
        state = _state_of(memory, bucket)
        memory.dirty.add(bucket.index)
        residual = None if codec.residual_name is None else state[codec.residual_name]
        round_ = replace(round_, bucket=bucket.index)
        if energy is None or residual is None:
            codec.reduce(bucket, state, self._all_reduce, round_)
        else:
            gradient, before = bucket.flat.clone(), bucket.flat + residual
            codec.reduce(bucket, state, self._all_reduce, round_)
            energy.add(gradient=gradient, sent=before - residual, residual=residual)

    def _all_reduce(self, tensor: Tensor) -> None:
        self._lap("encode_s")
        self._link.all_reduce(tensor)
        self._lap("transfer_s")

    def _waves(self, choice: CodecChoice, round_: Round) -> Iterator[list[int]]:
        """Groups buckets that are exchanged together; by expected instead of actual bytes, so that all ranks agree."""
        ratio = 1.0 if round_.flush else choice.bytes_ratio if choice.ratio is None else round_.ratio
        wave: list[int] = []
        size = 0.0
        for index in range(len(self._layout.buckets)):
            wave.append(index)
            size += 4.0 * self._layout.size_of(index) / ratio
            if size >= WAVE_BYTES:
                yield wave
                wave, size = [], 0.0
        if wave:
            yield wave

    def _encode(
        self, memory: CodecMemory, codec: SegmentCodec, bucket: Bucket, round_: Round, energy: Energy | None
    ) -> list[Payload]:
        state = _state_of(memory, bucket)
        memory.dirty.add(bucket.index)
        gradient = None if energy is None else bucket.flat.clone()
        payloads = codec.encode(bucket.flat, state, bucket.offsets, round_)
        self._lap("encode_s")
        if energy is not None and gradient is not None:
            sent = torch.zeros_like(bucket.flat)
            _add(codec, payloads, bucket.offsets, sent)
            residual = None if codec.residual_name is None else state[codec.residual_name].float()
            energy.add(gradient=gradient, sent=sent, residual=residual)
            self._lap(None)
        return payloads

    def _exchange(
        self,
        memory: CodecMemory,
        codec: SegmentCodec,
        wave: Sequence[int],
        tensors: Mapping[str, Tensor],
        round_: Round,
        energy: Energy | None,
    ) -> None:
        """Replaces the buckets of a wave by their sums."""
        payloads: dict[int, list[Payload]] = {}
        for index in wave:
            bucket = self._filled(index, tensors, memory)
            payloads[index] = self._encode(memory, codec, bucket, replace(round_, bucket=index), energy)
        shard = memory.shard
        summed_s = 0.0 if shard is None else shard.seconds
        found = self._link.exchange(payloads, round_)
        self._lap("transfer_s")
        if shard is not None:
            self._costs.transfer_s -= shard.seconds - summed_s
            self._costs.decode_s += shard.seconds - summed_s
        for index, sums in found.items():
            bucket = self._bucket(index)
            for payload, begin, taken in zip(payloads[index], bucket.offsets, sums.accepted, strict=False):
                if not taken and codec.residual_name is None:
                    codec.add(payload, self._late_of(bucket)[begin : begin + payload.size])
                elif not taken:
                    codec.credit(payload, memory.states[index], begin)
            bucket.flat.zero_()
            _add(codec.reply(), sums.replies, bucket.offsets, bucket.flat)
            for factor, (left, right) in zip(sums.factors, pairwise(bucket.offsets), strict=False):
                _scale(bucket.flat[left:right], factor)
        self._lap("decode_s")

    def _write_back(self, tensors: dict[str, Tensor], present: frozenset[str]) -> None:
        """Replaces tensors by views of the buckets."""
        for index, places in enumerate(self._places):
            flat = self._bucket(index).flat
            for place in places:
                sum_ = flat[place.begin : place.end]
                if place.name not in present and not bool(sum_.any()):
                    tensors.pop(place.name, None)
                    continue
                like = self._parameters[place.name]
                tensors[place.name] = sum_.view(like.shape).to(like.dtype)

    def _lap(self, part: str | None) -> None:
        """Adds the time since the last call to a phase; None discards it."""
        now = perf_counter()
        if part is not None:
            setattr(self._costs, part, getattr(self._costs, part) + now - self._lapped)
        self._lapped = now

    def _memory(self, key: CodecKey) -> CodecMemory:
        if key not in self.codec_memories:
            name, bits = key
            # Other codecs use their default settings.
            settings = load_codecs()[name].settings(**({"bits": bits} if bits else {}))
            self.codec_memories[key] = CodecMemory(codec=make_codec(settings))
        return self.codec_memories[key]

    def state(self) -> list[dict[str, Any]]:
        """Returns the states of all codecs on this rank, by parameter name; copies on the CPU."""
        found = []
        for (name, bits), memory in self.codec_memories.items():
            own_slices: ParameterSlices = {}
            shared_tensors: dict[str, State] = {}
            for index, state in memory.states.items():
                own, shared = _partition(memory.codec, state)
                own_slices |= split(self._places[index], own)
                if shared:
                    shared_tensors[digest_of(self._places[index])] = {
                        key: one.cpu().clone() for key, one in shared.items()
                    }
            of_shard: ParameterSlices = {}
            for index, state in memory.shard.states.items() if memory.shard is not None else ():
                of_shard |= split(self._places[index], state, begin=self._layout.offsets_of(index)[self._link.rank])
            if own_slices or shared_tensors or of_shard:
                found.append(
                    {"codec": name, "bits": bits, "states": own_slices, "shared": shared_tensors, "shard": of_shard}
                )
        late: ParameterSlices = {}
        for index, tensor in self._late.items():
            late |= split(self._places[index], {LATE: tensor})
        if late:
            found.append({"codec": LATE, "bits": 0, "states": late, "shared": {}, "shard": {}})
        return found

    def restore(self, states: Sequence[Sequence[dict[str, Any]]], *, mine: Sequence[int]) -> None:
        """Restores the states of all former ranks.

        Residuals of several ranks are added; shards take their segments of all shards' residuals. A shard's residual is lost if the
        shards are on servers now.

        Args:
            states: States of all ranks.
            mine: Indices of those whose residuals this rank takes over.

        Raises:
            ResidualsInvalid: if a state belongs to other parameters or another codec.
        """
        self.forget()
        sizes = {name: parameter.numel() for name, parameter in self._parameters.items()}
        for key in dict.fromkeys((one["codec"], one["bits"]) for state in states for one in state):
            if key[0] not in (*load_codecs(), LATE):
                raise ResidualsInvalid(f"unknown codec {key[0]!r} in the stored state")
            of_ranks = [[one for one in state if (one["codec"], one["bits"]) == key] for state in states]
            everyone = [one for entries in of_ranks for one in entries]
            merged = merge_finite((one["states"] for rank in mine for one in of_ranks[rank]), sizes)
            if key[0] == LATE:
                self._restore_late(merged)
                continue
            memory = self._memory(key)
            self._restore_states(memory, merged, everyone[0]["shared"])
            if isinstance(memory.codec, SegmentCodec):
                memory.shard = self._link.use(memory.codec)
                self._restore_shard(memory, memory.codec, merge_finite((one["shard"] for one in everyone), sizes))

    def _restore_states(self, memory: CodecMemory, merged: ParameterTensors, all_shared: Mapping[str, State]) -> None:
        for index, places in enumerate(self._places):
            shared = all_shared.get(digest_of(places), {})
            if shared or any(place.name in merged for place in places):
                memory.dirty.add(index)
                own, target = _partition(memory.codec, _state_of(memory, self._bucket(index)))
                assign(places, merged, own)
                for name, tensor in shared.items():
                    if name not in target or target[name].numel() != tensor.numel():
                        raise ResidualsInvalid(f"{name} stored by another codec")
                    # Otherwise it stays as new, on every rank.
                    if bool(tensor.isfinite().all()):
                        target[name].copy_(tensor)

    def _restore_late(self, merged: ParameterTensors) -> None:
        for index, places in enumerate(self._places):
            if any(place.name in merged for place in places):
                assign(places, merged, {LATE: self._late_of(self._bucket(index))})

    def _restore_shard(self, memory: CodecMemory, codec: SegmentCodec, merged: ParameterTensors) -> None:
        if memory.shard is None:
            return
        for index, places in enumerate(self._layout.buckets):
            if any(place.name in merged for place in places):
                left, right = self._layout.offsets_of(index)[self._link.rank :][:2]
                state = codec.reply().new_state(self._bucket(index).flat[left:right])
                assign(places, merged, state, begin=left)
                memory.shard.states[index] = state


def _consecutive(names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> tuple[ParameterSpan, ...]:
    """Lays out parameters one after another, each as a column."""
    ends = list(accumulate((parameters[name].numel() for name in names), initial=0))
    return tuple(
        ParameterSpan(name=name, rows=end - begin, columns=1, begin=begin)
        for name, begin, end in zip(names, ends, ends[1:], strict=False)
    )


def _size_of(places: Sequence[ParameterSpan]) -> int:
    return places[-1].end if places else 0


def _state_of(memory: CodecMemory, bucket: Bucket) -> State:
    """Returns a codec's state of a bucket, creating it if necessary."""
    codec = memory.codec
    if bucket.index not in memory.states:
        new = codec.new_state(bucket) if isinstance(codec, LinearCodec) else codec.new_state(bucket.flat)
        memory.states[bucket.index] = new
    return memory.states[bucket.index]


def _partition(codec: Codec, state: State) -> tuple[State, State]:
    """Returns the tensors of a state that cover the bucket, and those that all ranks share."""
    names = codec.shared if isinstance(codec, LinearCodec) else ()
    shared = {name: state[name] for name in names if name in state}
    return {name: tensor for name, tensor in state.items() if name not in shared}, shared


def _scale(sum_: Tensor, factor: float) -> None:
    """Makes the sum of some ranks as large as that of all would be."""
    if factor != 1.0:
        sum_.mul_(factor)


def _add(codec: SegmentCodec, payloads: Sequence[Payload], offsets: Sequence[int], out: Tensor) -> None:
    """Adds the decoded payloads of all segments to a flat tensor."""
    for payload, (left, right) in zip(payloads, pairwise(offsets), strict=True):
        codec.add(payload, out[left:right])
