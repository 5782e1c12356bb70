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
from typing import Annotated, Any, Final

import msgspec

from fulmen_llm_proxy.apis.api import UNREADABLE
from fulmen_llm_proxy.apis.collected import Collected, PolicyChange
from fulmen_llm_proxy.apis.usage import NO_COUNTS, TokenCounts, token_counts


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
    """

    index: int
    token_ids: bytes
    logprobs: bytes
    finish_reason: str
    versions: tuple[VersionRange, ...]
    prompt_ids: bytes = b""
    text: bytes = b""
    text_sizes: tuple[int, ...] = ()

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


class _Logprob(msgspec.Struct, gc=False):
    """Of texts, which are for people only, any value is read: a strange one must not spoil the call."""

    logprob: float
    token: Any = None
    bytes: msgspec.Raw = msgspec.Raw()


class _Logprobs(msgspec.Struct):
    """`content` in chat completions, `token_logprobs` and `tokens` in completions."""

    content: list[_Logprob] | None = None
    token_logprobs: list[float] | None = None
    tokens: Any = None


_PARTIAL: Final = "\N{REPLACEMENT CHARACTER}"
"""What backends write for a token that is a part of a character; its `bytes` have it."""

_BYTES = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=255)]])
_IDS = msgspec.json.Decoder(list[int] | None)
_PIECES_OF_IDS = msgspec.json.Decoder(list[list[int] | None])
_PIECES_OF_LOGPROBS = msgspec.json.Decoder(list[_Logprobs])
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
    prompt_ids = [] if collected.prompt_ids is None else _ids(collected.prompt_ids)
    usage = token_counts(collected.usage)
    spanned = () if collected.streamed else _versions_spanned(collected, default_version)
    choices = tuple(_decode_choice(index, collected, default_version, spanned) for index in sorted(collected.choices))
    if spanned and not all(_reported(collected, index) for index in collected.choices):
        flaws.append(Flaw.VERSION_CHANGED)
    if not prompt_ids and not (choices and all(choice.prompt_ids for choice in choices)):
        flaws.append(Flaw.PROMPT_IDS_MISSING)
    flaws += _judge(choices, usage)
    return Captured(prompt_ids=_pack_ids(prompt_ids), choices=choices, usage=usage, flaws=tuple(flaws))


def _judge(choices: tuple[CapturedChoice, ...], usage: TokenCounts) -> list[Flaw]:
    flaws: list[Flaw] = []
    if not choices or not all(choice.token_ids for choice in choices):
        flaws.append(Flaw.TOKEN_IDS_MISSING)
    if not choices or not all(choice.logprobs for choice in choices):
        flaws.append(Flaw.LOGPROBS_MISSING)
    if any(len(choice.token_ids) != len(choice.logprobs) for choice in choices):
        flaws.append(Flaw.LENGTH_MISMATCH)
    if usage.completion is None:
        flaws.append(Flaw.USAGE_MISSING)
    elif usage.completion != sum(choice.token_count for choice in choices):
        flaws.append(Flaw.USAGE_MISMATCH)
    if not all(choice.finish_reason for choice in choices):
        flaws.append(Flaw.FINISH_REASON_MISSING)
    if not all(_covers(choice.versions, choice.token_count) for choice in choices):
        flaws.append(Flaw.VERSIONS_INVALID)
    return flaws


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


def _decode_choice(index: int, collected: Collected, default_version: int, spanned: tuple[int, ...]) -> CapturedChoice:
    kept = collected.choices[index]
    pieces = [piece or [] for piece in _PIECES_OF_IDS.decode(_joined(kept.token_ids))]
    token_ids = pieces[0] if len(pieces) == 1 else [token_id for piece in pieces for token_id in piece]
    logprobs: list[float] = []
    texts: list[bytes] = []
    for found in _PIECES_OF_LOGPROBS.decode(_joined(kept.logprobs)):
        logprobs += found.token_logprobs or [entry.logprob for entry in found.content or ()]
        texts += _texts(found)
    known = len(texts) == len(token_ids) and any(texts)
    reported = _reported(collected, index)
    versions = () if reported is None else tuple(_VERSIONS.decode(reported))
    if not versions and spanned:
        versions = spanned_versions(len(token_ids), spanned)
    elif not versions and token_ids:
        lengths = [len(piece) for piece in pieces]
        versions = observed_versions(index, lengths, default_version, collected.policy_changes)
    return CapturedChoice(
        index=index,
        token_ids=_pack_ids(token_ids),
        logprobs=struct.pack(f"<{len(logprobs)}f", *logprobs),
        finish_reason=kept.finish_reason or "",
        versions=versions,
        prompt_ids=b"" if kept.prompt_ids is None else _pack_ids(_ids(kept.prompt_ids)),
        text=b"".join(texts) if known else b"",
        text_sizes=tuple(map(len, texts)) if known else (),
    )


def _texts(found: _Logprobs) -> list[bytes]:
    """Returns the bytes of each token, empty where the backend does not say."""
    if found.token_logprobs:
        return [_text(each, None) for each in found.tokens] if isinstance(found.tokens, list) else []
    entries = found.content or ()
    try:
        tokens = [entry.token for entry in entries]
        if _PARTIAL not in "".join(tokens):
            return [token.encode() for token in tokens]
    except (TypeError, UnicodeEncodeError):
        pass  # not all are texts
    return [_text(entry.token, entry.bytes) for entry in entries]


def _text(token: object, raw: msgspec.Raw | None) -> bytes:
    if not isinstance(token, str):
        return b""
    if raw and _PARTIAL in token:
        try:
            return bytes(_BYTES.decode(raw))
        except UNREADABLE:
            pass
    return token.encode(errors="replace")


def _joined(raws: list[msgspec.Raw]) -> bytes:
    """Joins slices to one JSON list, which decodes in a third of the time of the pieces."""
    return b"[%b]" % b",".join(raws)


def _ids(raw: msgspec.Raw) -> list[int]:
    return _IDS.decode(raw) or []


def _pack_ids(token_ids: list[int]) -> bytes:
    # Several times faster than array("i", ...), and little-endian on every machine.
    return struct.pack(f"<{len(token_ids)}i", *token_ids)
