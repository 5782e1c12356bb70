"""Decodes the slices of an answer into packed token ids and log-probabilities, and validates them.

Invariant: a call is usable for training only if every choice has as many completion token ids as log-probabilities,
their sum over the choices equals the usage that the backend reports, and the prompt's token ids and every finish
reason are present. Any other call is kept and marked; text is never tokenised again to replace missing ids.

The backend's report of policy versions takes precedence. Without one, the tokens belong to the version that the target
had when the call was sent. If that version changed during a stream, tokens received before the change belong to the old
version and later ones to the new. This is exact if versions are promoted while the engine is paused and the caller
reads as fast as the engine writes. In a complete answer the position of the change is unknown: its record names both
versions and is marked as unusable for training.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Annotated

import msgspec

from fulmen.routed_experts import RoutedExperts, RoutedExpertsInvalid
from fulmen_llm_proxy.apis.api import UNREADABLE
from fulmen_llm_proxy.apis.collected import Collected, PolicyChange
from fulmen_llm_proxy.apis.usage import NO_COUNTS, TokenCounts, token_counts
from fulmen_llm_proxy.capture.experts import decode_experts
from fulmen_llm_proxy.capture.token_lists import pack_ids, pack_logprobs


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
    VERSION_CHANGED = "policy_version_changed"
    EXPERTS_INVALID = "routed_experts_invalid"


class VersionRange(msgspec.Struct, frozen=True):
    """The policy version that sampled the completion tokens `start` (included) to `end` (not)."""

    version: Annotated[int, msgspec.Meta(ge=0, le=10**18)]
    start: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    end: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


def observed_versions(
    index: int, piece_lengths: Sequence[int], first_version: int, changes: Sequence[PolicyChange]
) -> tuple[VersionRange, ...]:
    """Returns the versions of a streamed choice, in order, without empty ranges.

    Args:
        piece_lengths: number of tokens of each piece, in order of arrival.
        first_version: version when the call was sent.
        changes: version changes, in order of arrival.
    """
    total = sum(piece_lengths)
    if not changes:
        return (VersionRange(version=first_version, start=0, end=total),) if total else ()
    versions = [first_version, *(change.version for change in changes)]
    bounds = [0, *(sum(piece_lengths[: change.pieces.get(index, 0)]) for change in changes), total]
    return tuple(
        VersionRange(version=version, start=start, end=end)
        for version, (start, end) in zip(versions, pairwise(bounds), strict=True)
        if end > start
    )


def spanned_versions(total: int, versions: Sequence[int]) -> tuple[VersionRange, ...]:
    """Returns the versions of a choice of a complete answer during which the version changed.

    The first version gets all tokens; later ones, which were active by the end, get none.
    """
    first, *others = versions
    return (
        VersionRange(version=first, start=0, end=total),
        *(VersionRange(version=version, start=total, end=total) for version in others),
    )


class CapturedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an answer, packed.

    Attributes:
        token_ids: little-endian int32 ids of the completion.
        logprobs: little-endian float32 natural-log probabilities, one for each id.
        versions: policy versions by token range, covering every id.
        prompt_ids: little-endian int32 ids of its own prompt; empty if all choices share one prompt.
        text: bytes of the tokens, one after the other; empty if the backend did not report those of each.
        text_sizes: how many bytes of `text` each token has.
        experts: experts that computed tokens of prompt and completion; None if the backend did not report them.
        experts_invalid: whether it reported something else instead.
    """

    index: int
    token_ids: bytes
    logprobs: bytes
    finish_reason: str
    versions: tuple[VersionRange, ...]
    prompt_ids: bytes = b""
    text: bytes = b""
    text_sizes: tuple[int, ...] = ()
    experts: RoutedExperts | None = None
    experts_invalid: bool = False

    @property
    def token_count(self) -> int:
        """Number of completion tokens."""
        return len(self.token_ids) // _INT32_BYTES


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """The decoded capture of a call; usable for training if `flaws` is empty."""

    prompt_ids: bytes
    choices: tuple[CapturedChoice, ...]
    usage: TokenCounts
    flaws: tuple[Flaw, ...]


_INT32_BYTES = 4


_VERSION = msgspec.json.Decoder(int, strict=False)
_VERSIONS = msgspec.json.Decoder(list[VersionRange], strict=False)
"""Not strict: some engines report the version as a string of digits."""


def decode_capture(collected: Collected, *, default_version: int) -> Captured:
    """Decodes and validates an answer.

    Args:
        collected: the slices of the answer.
        default_version: policy version of the target when the call was sent, for backends that report none.
    """
    flaws: list[Flaw] = []
    if not collected.complete:
        flaws.append(Flaw.INCOMPLETE)
    if collected.error:
        flaws.append(Flaw.BACKEND_ERROR)
    if collected.malformed or not all(map(_is_text, collected.payloads)):
        flaws.append(Flaw.MALFORMED)
    try:
        return _decode(collected, default_version, flaws)
    except (*UNREADABLE, struct.error, OverflowError):
        # An id beyond int32, or a list of other values: nothing of it can be trained on.
        if Flaw.MALFORMED not in flaws:
            flaws.append(Flaw.MALFORMED)
        return Captured(prompt_ids=b"", choices=(), usage=NO_COUNTS, flaws=tuple(flaws))


def _is_text(payload: bytes) -> bool:
    """Returns whether a document is UTF-8, which readers do not check: they pass the slices that they do not read."""
    if payload.isascii():
        return True
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True


def _decode(collected: Collected, default_version: int, flaws: list[Flaw]) -> Captured:
    prompt_ids = b"" if collected.prompt_ids is None else pack_ids([collected.prompt_ids])[0]
    usage = token_counts(collected.usage)
    spanned = () if collected.streamed else _versions_spanned(collected, default_version)
    choices = tuple(
        _decode_choice(index, collected, default_version, spanned, prompt_ids) for index in sorted(collected.choices)
    )
    if spanned and not all(_reported(collected, index) for index in collected.choices):
        flaws.append(Flaw.VERSION_CHANGED)
    if not prompt_ids and not (choices and all(choice.prompt_ids for choice in choices)):
        flaws.append(Flaw.PROMPT_IDS_MISSING)
    flaws += _judge(choices, usage)
    return Captured(prompt_ids=prompt_ids, choices=choices, usage=usage, flaws=tuple(flaws))


def _judge(choices: tuple[CapturedChoice, ...], usage: TokenCounts) -> list[Flaw]:
    # One pass: this runs for every call.
    found: set[Flaw] = set()
    total = 0
    for choice in choices:
        count = choice.token_count
        total += count
        if not count:
            found.add(Flaw.TOKEN_IDS_MISSING)
        if not choice.logprobs:
            found.add(Flaw.LOGPROBS_MISSING)
        if len(choice.token_ids) != len(choice.logprobs):
            found.add(Flaw.LENGTH_MISMATCH)
        if not choice.finish_reason:
            found.add(Flaw.FINISH_REASON_MISSING)
        if not _covers(choice.versions, count):
            found.add(Flaw.VERSIONS_INVALID)
        if choice.experts_invalid:
            found.add(Flaw.EXPERTS_INVALID)
    if not choices:
        found |= {Flaw.TOKEN_IDS_MISSING, Flaw.LOGPROBS_MISSING}
    if usage.completion is None:
        found.add(Flaw.USAGE_MISSING)
    elif usage.completion != total:
        found.add(Flaw.USAGE_MISMATCH)
    return [flaw for flaw in Flaw if flaw in found] if found else []


def _covers(ranges: tuple[VersionRange, ...], token_count: int) -> bool:
    """Returns whether the ranges are contiguous, ordered, and cover every token."""
    reached = 0
    for part in ranges:
        if part.start != reached or part.end < part.start:
            return False
        reached = part.end
    return reached == token_count


def _reported(collected: Collected, index: int) -> msgspec.Raw | None:
    """Returns the versions of a choice as the backend reports them."""
    return collected.choices[index].weight_versions or collected.weight_versions


def oldest_reported(collected: Collected) -> int | None:
    """Returns the oldest policy version that the backend reports for a token of the answer; None if it reports none."""
    try:
        found = [
            part.version
            for index in collected.choices
            if (reported := _reported(collected, index)) is not None
            for part in _VERSIONS.decode(reported)
            if part.end > part.start
        ]
        if collected.end_version is not None:
            found.append(_VERSION.decode(collected.end_version))
    except UNREADABLE:
        return None  # the capture says that it is malformed
    return min(found, default=None)


def _versions_spanned(collected: Collected, default_version: int) -> tuple[int, ...]:
    """Returns the versions active during a complete answer; empty if there was only one."""
    versions = [default_version, *(change.version for change in collected.policy_changes)]
    if collected.end_version is not None:
        end_version = _VERSION.decode(collected.end_version)
        if end_version != versions[-1]:
            versions.append(end_version)
    return tuple(versions) if len(versions) > 1 else ()


def _decode_choice(
    index: int, collected: Collected, default_version: int, spanned: tuple[int, ...], shared_prompt: bytes
) -> CapturedChoice:
    kept = collected.choices[index]
    token_ids, lengths = pack_ids(kept.token_ids)
    logprobs, text, text_sizes = pack_logprobs(kept.logprobs)
    known = len(text_sizes) == sum(lengths) and text
    reported = _reported(collected, index)
    versions = () if reported is None else tuple(_VERSIONS.decode(reported))
    if not versions and spanned:
        versions = spanned_versions(sum(lengths), spanned)
    elif not versions and token_ids:
        versions = observed_versions(index, lengths, default_version, collected.policy_changes)
    prompt_ids = b"" if kept.prompt_ids is None else pack_ids([kept.prompt_ids])[0]
    experts, experts_invalid = None, False
    if kept.routed_experts is not None:
        total = (len(prompt_ids or shared_prompt) + len(token_ids)) // _INT32_BYTES
        try:
            experts = decode_experts(kept.routed_experts, tokens=total)
        except RoutedExpertsInvalid:
            experts_invalid = True
    return CapturedChoice(
        index=index,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=kept.finish_reason or "",
        versions=versions,
        prompt_ids=prompt_ids,
        text=text if known else b"",
        text_sizes=tuple(text_sizes) if known else (),
        experts=experts,
        experts_invalid=experts_invalid,
    )
