"""Turns the slices of an answer into packed token ids and log-probabilities, and judges them.

Invariant: a call is usable for training only if, for every choice, the number of completion token
ids equals the number of log-probabilities, their sum over the choices equals the usage that the
backend reports, and the prompt's token ids and every finish reason are there. A call that fails
this is kept and marked; text is never tokenised again in place of missing ids.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from fulmen_llm_proxy.domain.answer import Collected, CollectedChoice


class Flaw(StrEnum):
    """Why a call may not be trained on."""

    INCOMPLETE = "incomplete"
    MALFORMED = "malformed_answer"
    BACKEND_ERROR = "backend_error"
    PROMPT_IDS_MISSING = "prompt_ids_missing"
    TOKEN_IDS_MISSING = "token_ids_missing"  # noqa: S105 - tokens of a model
    LOGPROBS_MISSING = "logprobs_missing"
    LENGTH_MISMATCH = "length_mismatch"
    USAGE_MISSING = "usage_missing"
    USAGE_MISMATCH = "usage_mismatch"
    FINISH_REASON_MISSING = "finish_reason_missing"
    VERSIONS_INVALID = "policy_versions_invalid"


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the backend reports them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class VersionRange(msgspec.Struct, frozen=True):
    """The policy version that sampled the completion tokens `start` (included) to `end` (not)."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedChoice:
    """One choice of an answer, packed.

    Attributes:
        token_ids: little-endian int32 ids of the completion.
        logprobs: little-endian float32 natural-log probabilities, one for each id.
        versions: policy version per token range, covering every id.
    """

    index: int
    token_ids: bytes
    logprobs: bytes
    finish_reason: str
    versions: tuple[VersionRange, ...]

    @property
    def token_count(self) -> int:
        """Number of completion tokens."""
        return len(self.token_ids) // _INT32_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The decoded capture of one call; `flaws` is empty when it is usable for training."""

    prompt_ids: bytes
    choices: tuple[CapturedChoice, ...]
    usage: Usage
    flaws: tuple[Flaw, ...]


_INT32_BYTES = 4


class _Logprob(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


_IDS = msgspec.json.Decoder(list[int] | None)
_LOGPROBS = msgspec.json.Decoder(_Logprobs)
_USAGE = msgspec.json.Decoder(Usage)
_VERSIONS = msgspec.json.Decoder(list[VersionRange], strict=False)
"""Not strict: some engines report the version as a string of digits."""


def decode_capture(collected: Collected, *, default_version: int) -> Captured:
    """Decodes and judges what an answer brought.

    Args:
        collected: the slices of the answer.
        default_version: policy version of the route's target, for backends that report none.
    """
    flaws: list[Flaw] = []
    if not collected.complete:
        flaws.append(Flaw.INCOMPLETE)
    if collected.error:
        flaws.append(Flaw.BACKEND_ERROR)
    if collected.malformed:
        flaws.append(Flaw.MALFORMED)
    try:
        return _decode(collected, default_version, flaws)
    except (msgspec.DecodeError, struct.error, OverflowError):
        # An id beyond int32, or a list of something else: nothing of it can be trained on.
        if Flaw.MALFORMED not in flaws:
            flaws.append(Flaw.MALFORMED)
        return Captured(prompt_ids=b"", choices=(), usage=Usage(), flaws=tuple(flaws))


def _decode(collected: Collected, default_version: int, flaws: list[Flaw]) -> Captured:
    prompt_ids = [] if collected.prompt_ids is None else _ids(collected.prompt_ids)
    if not prompt_ids:
        flaws.append(Flaw.PROMPT_IDS_MISSING)
    usage = Usage() if collected.usage is None else _USAGE.decode(collected.usage)
    choices = tuple(
        _decode_choice(index, kept, collected.weight_versions, default_version)
        for index, kept in sorted(collected.choices.items())
    )
    flaws += _judge(choices, usage)
    return Captured(prompt_ids=_pack_ids(prompt_ids), choices=choices, usage=usage, flaws=tuple(flaws))


def _judge(choices: tuple[CapturedChoice, ...], usage: Usage) -> list[Flaw]:
    flaws: list[Flaw] = []
    if not choices or not all(choice.token_ids for choice in choices):
        flaws.append(Flaw.TOKEN_IDS_MISSING)
    if not choices or not all(choice.logprobs for choice in choices):
        flaws.append(Flaw.LOGPROBS_MISSING)
    if any(len(choice.token_ids) != len(choice.logprobs) for choice in choices):
        flaws.append(Flaw.LENGTH_MISMATCH)
    if usage.completion_tokens is None:
        flaws.append(Flaw.USAGE_MISSING)
    elif usage.completion_tokens != sum(choice.token_count for choice in choices):
        flaws.append(Flaw.USAGE_MISMATCH)
    if not all(choice.finish_reason for choice in choices):
        flaws.append(Flaw.FINISH_REASON_MISSING)
    if not all(_covers(choice.versions, choice.token_count) for choice in choices):
        flaws.append(Flaw.VERSIONS_INVALID)
    return flaws


def _covers(ranges: tuple[VersionRange, ...], token_count: int) -> bool:
    """Tells whether the ranges are contiguous, in order, and cover every token."""
    reached = 0
    for part in ranges:
        if part.start != reached or part.end < part.start:
            return False
        reached = part.end
    return reached == token_count


def _decode_choice(
    index: int, kept: CollectedChoice, shared_versions: msgspec.Raw | None, default_version: int
) -> CapturedChoice:
    token_ids: list[int] = []
    for raw in kept.token_ids:
        token_ids += _ids(raw)
    logprobs: list[float] = []
    for raw in kept.logprobs:
        logprobs += [entry.logprob for entry in _LOGPROBS.decode(raw).content or ()]
    reported = kept.weight_versions or shared_versions
    versions = () if reported is None else tuple(_VERSIONS.decode(reported))
    if not versions and token_ids:
        versions = (VersionRange(version=default_version, start=0, end=len(token_ids)),)
    return CapturedChoice(
        index=index,
        token_ids=_pack_ids(token_ids),
        logprobs=struct.pack(f"<{len(logprobs)}f", *logprobs),
        finish_reason=kept.finish_reason or "",
        versions=versions,
    )


def _ids(raw: msgspec.Raw) -> list[int]:
    return _IDS.decode(raw) or []


def _pack_ids(token_ids: list[int]) -> bytes:
    # Several times faster than array("i", ...), and little-endian on every machine.
    return struct.pack(f"<{len(token_ids)}i", *token_ids)
