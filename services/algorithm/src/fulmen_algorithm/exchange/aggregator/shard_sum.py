"""Sums the payloads of one shard, and keeps what it has summed in files, so that a restart loses nothing.

Invariant: a sum is in its file before any rank gets it. What the shard keeps back for later rounds is restored only as
it was after the newest sum that a rank may have; otherwise it is lost, and that is counted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import structlog
import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fulmen_algorithm.exchange import wire
from fulmen_algorithm.exchange.aggregator.effects import Done, SumDue
from fulmen_algorithm.exchange.aggregator.membership import Key
from fulmen_algorithm.exchange.aggregator.terms import MAX_RANKS, SUM, CallTerms, Problem, Terms
from fulmen_algorithm.exchange.codec import Payload, PayloadInvalid, Round, SegmentCodec
from fulmen_algorithm.exchange.registry import load_codecs
from fulmen_algorithm.exchange.shard import Shard

SUM_VERSION = 1
REPLY, STATE = "reply", "state."

_log = structlog.get_logger()


class TermsRefused(Exception):
    """A codec cannot be had under the terms of a run."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("; ".join(f"{problem.field}: {problem.description}" for problem in problems))
        self.problems = problems


class PayloadsRefused(Exception):
    """Payloads cannot be summed; by rank, why."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__(str(dict(reasons)))
        self.reasons = reasons


def sum_payload(tensor: torch.Tensor) -> Payload:
    """Wraps a flat tensor that is to be summed as it is: float32 or bfloat16, [n]."""
    return Payload(codec=SUM, version=SUM_VERSION, size=tensor.numel(), parts=(tensor,))


class ShardSum:
    """The sums of one shard of one run. Not for several threads at a time."""

    def __init__(self, terms: Terms, *, folder: Path | None = None) -> None:
        """Finds the codec.

        Args:
            terms: What the ranks agree on.
            folder: Where sums are kept; None: nowhere.

        Raises:
            TermsRefused: if there is no such codec, or its settings are not valid.
        """
        self._terms = terms
        self._codec = _codec_of(terms)
        self._shard = None if self._codec is None else Shard(self._codec)
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    @property
    def keeps_state(self) -> bool:
        """Whether the shard keeps anything back for later rounds."""
        return self._codec is not None and bool(self._codec.reply().new_state(torch.zeros(1)))

    def reduce(self, due: SumDue, *, epoch: int) -> bytes:
        """Returns the encoded sum of payloads.

        Raises:
            PayloadsRefused: if some are not what the codec makes; nothing is changed then.
        """
        payloads, reasons = self._decoded(due)
        if reasons:
            raise PayloadsRefused(reasons)
        if due.terms.needs_all:
            reply = bytes(wire.encode(_plain_sum(list(payloads.values()))))
        else:
            reply = self._encoded_sum(due, payloads)
        if self._folder is not None:
            self._keep(self._folder, due, reply, epoch)
        return reply

    def restore(self, *, at_least: int) -> tuple[dict[Key, tuple[CallTerms, Done]], int]:
        """Reads what was kept, unless it is of other terms, damaged, or older than what ranks have.

        Args:
            at_least: The oldest round whose sums are of use.

        Returns:
            The sums, and the epoch; nothing and 0 if they are of no use.
        """
        kept: dict[Key, tuple[CallTerms, Done]] = {}
        states: dict[int, tuple[Key, dict[str, torch.Tensor]]] = {}
        epoch = 0
        for path in sorted(self._folder.glob("*.safetensors")) if self._folder is not None else ():
            try:
                key, terms, done, state, its_epoch = self._read(path)
            except (SafetensorError, OSError, KeyError, TypeError, ValueError, PayloadInvalid) as error:
                _log.warning("kept_sum_not_read", file=path.name, error=type(error).__name__)
                continue
            epoch = max(epoch, its_epoch)
            kept[key] = terms, done
            if not terms.needs_all and (terms.bucket not in states or key > states[terms.bucket][0]):
                states[terms.bucket] = key, state
        newest = max((number for number, _ in kept), default=0)
        if newest < at_least:
            return {}, 0
        if self._shard is not None:
            self._shard.states.update({bucket: state for bucket, (_, state) in states.items()})
        return {key: value for key, value in kept.items() if key[0] >= newest - 1}, epoch

    def _decoded(self, due: SumDue) -> tuple[dict[int, Payload], dict[int, str]]:
        payloads: dict[int, Payload] = {}
        reasons: dict[int, str] = {}
        kinds: dict[tuple[torch.dtype, int], int] = {}
        for rank, data in due.payloads.items():
            try:
                payload = payloads[rank] = wire.decode(data)
                if not due.terms.needs_all:
                    size = self._terms.segment_sizes[due.terms.bucket]
                    if payload.size != size:
                        raise PayloadInvalid(f"the segment has {size} elements, the payload {payload.size}")
                    continue
                kinds.setdefault(_kind_of(payload), rank)
                if len(kinds) > 1:
                    raise PayloadInvalid(f"rank {min(kinds.values())} sums a tensor of another type or size")
            except PayloadInvalid as error:
                reasons[rank] = str(error)
        return payloads, reasons

    def _encoded_sum(self, due: SumDue, payloads: Mapping[int, Payload]) -> bytes:
        shard, codec, terms = self._shard, self._codec, due.terms
        assert shard is not None
        assert codec is not None
        round_ = Round(
            number=terms.number,
            world_size=due.member_count,
            ratio=terms.ratio,
            rank=MAX_RANKS + self._terms.shard,  # no rank draws by it, whoever has come and gone
            seed=terms.seed,
            flush=terms.flush,
        )
        try:
            return bytes(wire.encode(shard.reduce(terms.bucket, list(payloads.values()), round_)))
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

    def _keep(self, folder: Path, due: SumDue, reply: bytes, epoch: int) -> None:
        number, call = due.key
        tensors = {REPLY: torch.frombuffer(bytearray(reply), dtype=torch.uint8)}
        if self._shard is not None and not due.terms.needs_all:
            tensors |= {f"{STATE}{name}": value for name, value in self._shard.states[due.terms.bucket].items()}
        about = {
            "round": number,
            "call": call,
            "epoch": epoch,
            "terms": asdict(due.terms),
            "taken": {str(rank): incarnation for rank, incarnation in due.taken.items()},
            "member_count": due.member_count,
            "run": _name_of(self._terms),
        }
        # Replaced in the next round: ranks are never more than a sum apart.
        path = folder / f"{f'call-{call}' if due.terms.needs_all else f'bucket-{due.terms.bucket}'}.safetensors"
        aside = path.with_suffix(".new")
        save_file(tensors, aside, metadata={"about": json.dumps(about)})
        aside.replace(path)

    def _read(self, path: Path) -> tuple[Key, CallTerms, Done, dict[str, torch.Tensor], int]:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        if about["run"] != _name_of(self._terms):
            raise ValueError("of other terms")
        terms = CallTerms(**about["terms"])
        taken = {int(rank): str(incarnation) for rank, incarnation in about["taken"].items()}
        reply = tensors.pop(REPLY).numpy().tobytes()
        wire_sum = wire.decode(reply)
        state = {name.removeprefix(STATE): value for name, value in tensors.items()}
        if any(value.numel() != wire_sum.size for value in state.values()):
            raise ValueError("of another size")
        done = Done(taken=taken, member_count=int(about["member_count"]), reply=reply)
        return (int(about["round"]), int(about["call"])), terms, done, state, int(about["epoch"])


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
    if part.dtype not in (torch.float32, torch.bfloat16) or part.numel() != payload.size:
        raise PayloadInvalid("a tensor that is summed as it is has float32 or bfloat16")
    return part.dtype, part.numel()


def _plain_sum(payloads: list[Payload]) -> Payload:
    """Sums in float32, in the order of ranks, and rounds once."""
    sum_ = torch.zeros(payloads[0].size, dtype=torch.float32)
    for payload in payloads:
        sum_ += payload.parts[0].float()
    return sum_payload(sum_.to(payloads[0].parts[0].dtype))


def _name_of(terms: Terms) -> str:
    return json.dumps([terms.layout_digest, terms.codec, terms.codec_version, terms.settings_json, terms.shard_count])
