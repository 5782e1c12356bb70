"""Turns the captured model calls of an attempt into training rows, by token id. No tensors, no tokenizer.

Invariant: every token of a usable call that is not an orphan is in exactly one row's response as a sampled token;
`loss_mask` is true on sampled tokens and nowhere else. Consecutive calls of one agent merge into one row if and only
if the next prompt begins, token by token, with everything the row holds; what it adds is masked. Text is never
tokenised again.

Source: the re-tokenisation drift described in https://blog.vllm.ai/2025/10/22/agent-lightning.html.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import zstandard

from fulmen.model_call import (
    ENTRY_BYTES,
    ModelCall,
    ModelCallInvalid,
    VersionRange,
    read_model_call,
    unpack_logprobs,
    unpack_token_ids,
)
from fulmen.store.v1.span_pb2 import SpanBatch, SpanChunk, SpanCodec

MAX_BATCH_BYTES = 64 * 1024 * 1024
"""The most that one chunk may decompress to."""

Messages = tuple[Mapping[str, Any], ...]


class BreakReason(StrEnum):
    """Why a call of a known conversation began a new row.

    TEMPLATE: the chat template rendered the earlier turns in another way. RETOKENISATION: the same answer came back
    as other token ids. OTHER: the agent itself did not continue what it had before.
    """

    TEMPLATE = "template"
    RETOKENISATION = "retokenisation"
    OTHER = "other"


class DropReason(StrEnum):
    """Why a call is in no row."""

    ORPHANED = "orphaned"
    UNUSABLE = "unusable"
    NOT_TRAINABLE = "not_trainable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sequence to train on: a prompt and what followed, of which the sampled tokens train.

    Attributes:
        prompt_ids: Token ids before the first sampled token.
        response_ids: R token ids from the first sampled one on.
        loss_mask: R flags; true where the policy sampled the token.
        logprobs: R natural log-probabilities under the sampling policy; 0.0 where the mask is false.
        versions: Policy versions over positions of `response_ids`; they cover exactly the sampled tokens whose
            version is known or reported as 0.
        temperature: Sampling temperature of all its calls, unitless; None if unknown.
        agent_name: The agent or role that called; empty means the only one.
        policy: The trainable policy.
        call_count: How many model calls it holds.
        finish_reason: Why the last call stopped.
        messages: The conversation of the last call with its answer, as chat messages; empty if it was not recorded.
        tools: The tools that the last call offered.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRange, ...]
    temperature: float | None
    agent_name: str
    policy: str
    call_count: int
    finish_reason: str
    messages: Messages = ()
    tools: Messages = ()

    def version_per_token(self, *, masked: int) -> tuple[int, ...]:
        """Returns the policy version of each response token, `masked` where none sampled it, 0 where unknown."""
        result = [0 if sampled else masked for sampled in self.loss_mask]
        for versions in self.versions:
            result[versions.start : versions.end] = [versions.version] * (versions.end - versions.start)
        return tuple(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The rows of one attempt, in order of their first call, and what was left out or broken up.

    `breaks` counts rows that began although their agent had one before; `drops` counts calls that are in no row.
    """

    rows: tuple[Row, ...]
    breaks: Mapping[BreakReason, int]
    drops: Mapping[DropReason, int]

    def of_agent(self, name: str) -> tuple[Row, ...]:
        """Returns the rows of one agent or role."""
        return tuple(row for row in self.rows if row.agent_name == name)


def trajectories(chunks: Iterable[SpanChunk]) -> dict[str, Trajectory]:
    """Builds the trajectory of every attempt that has spans among the chunks, by attempt name.

    The order of the chunks does not matter; chunks and spans that come twice count once.

    Raises:
        ModelCallInvalid: If a record contradicts itself or a chunk cannot be decompressed.
    """
    by_attempt: dict[str, dict[str, SpanChunk]] = {}
    for chunk in chunks:
        by_attempt.setdefault(chunk.attempt, {})[chunk.chunk_id] = chunk
    return {name: assemble(read_calls(unique.values())) for name, unique in by_attempt.items()}


def trajectory(chunks: Iterable[SpanChunk]) -> Trajectory:
    """Builds the trajectory of one attempt from all its chunks; see `trajectories`."""
    return assemble(read_calls(chunks))


def read_calls(chunks: Iterable[SpanChunk]) -> list[ModelCall]:
    """Reads the captured model calls of one attempt in order of their start; each span counts once.

    Raises:
        ModelCallInvalid: If a record contradicts itself or a chunk cannot be decompressed.
    """
    calls: dict[bytes, ModelCall] = {}
    for chunk in chunks:
        for record in SpanBatch.FromString(_decompressed(chunk)).spans:
            if record.model_call:
                call = read_model_call(record)
                calls[call.span_id] = call
    return sorted(calls.values(), key=lambda call: (call.start_time_ns, call.span_id))


def assemble(calls: Sequence[ModelCall]) -> Trajectory:
    """Merges calls, given in order of their start, into rows."""
    orphans = _orphans(calls)
    drops: Counter[DropReason] = Counter()
    breaks: Counter[BreakReason] = Counter()
    rows: list[_OpenRow] = []
    for index, call in enumerate(calls):
        if reason := _why_dropped(call, orphan=index in orphans):
            drops[reason] += 1
            continue
        family = [row for row in rows if row.family == _family(call)]
        continued = [row for row in family if call.prompt.startswith(row.tokens)]
        if continued:
            max(continued, key=lambda row: len(row.tokens)).extend(call)
            continue
        if family:
            breaks[why_broken(family[-1].last_call, family[-1].tokens, call)] += 1
        rows.append(_OpenRow(call))
    return Trajectory(rows=tuple(row.close() for row in rows), breaks=breaks, drops=drops)


def why_broken(previous: ModelCall, held: bytes, call: ModelCall) -> BreakReason:
    """Tells why a call does not continue a row.

    Args:
        previous: The row's last call.
        held: The row's packed tokens: prompt and response.
        call: The call whose prompt does not begin with `held`.
    """
    before, answer = _request_messages(previous), _answer_message(previous)
    now = _request_messages(call)
    if answer is None or len(now) <= len(before) or now[: len(before)] != before:
        return BreakReason.OTHER
    if not _same_answer(answer, now[len(before)]):
        return BreakReason.OTHER
    common = _common_prefix_entries(held, call.prompt)
    response_start = len(previous.prompt) // ENTRY_BYTES
    thinking_left_out = bool(answer.get("reasoning_content") or answer.get("reasoning")) and not (
        now[len(before)].get("reasoning_content") or now[len(before)].get("reasoning")
    )
    # The last token is the end of the turn: a template writes its own there.
    at_the_end = common >= len(held) // ENTRY_BYTES - 1
    if common < response_start or at_the_end or thinking_left_out:
        return BreakReason.TEMPLATE
    return BreakReason.RETOKENISATION


@dataclass(slots=True, kw_only=True)
class _Part:
    """A call inside a row: how many masked tokens go before its completion."""

    call: ModelCall
    added: int


@dataclass(slots=True, init=False)
class _OpenRow:
    family: tuple[str, str, str, float | None]
    tokens: bytes
    parts: list[_Part] = field(default_factory=list)

    def __init__(self, call: ModelCall) -> None:
        self.family = _family(call)
        self.tokens = call.prompt + call.completion
        self.parts = [_Part(call=call, added=0)]

    @property
    def last_call(self) -> ModelCall:
        return self.parts[-1].call

    def extend(self, call: ModelCall) -> None:
        self.parts.append(_Part(call=call, added=(len(call.prompt) - len(self.tokens)) // ENTRY_BYTES))
        self.tokens = call.prompt + call.completion

    def close(self) -> Row:
        first, last = self.parts[0].call, self.last_call
        mask: list[bool] = []
        logprobs: list[float] = []
        versions: list[VersionRange] = []
        for part in self.parts:
            mask += [False] * part.added
            logprobs += [0.0] * part.added
            start = len(mask)
            logprobs += unpack_logprobs(part.call.logprobs)
            mask += [True] * (len(logprobs) - start)
            versions += [
                VersionRange(version=v.version, start=start + v.start, end=start + v.end) for v in part.call.versions
            ]
        ids = unpack_token_ids(self.tokens)
        prompt_count = len(first.prompt) // ENTRY_BYTES
        answer = _answer_message(last)
        return Row(
            prompt_ids=tuple(ids[:prompt_count]),
            response_ids=tuple(ids[prompt_count:]),
            loss_mask=tuple(mask),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            temperature=first.temperature,
            agent_name=first.agent_name,
            policy=first.policy,
            call_count=len(self.parts),
            finish_reason=last.finish_reason,
            messages=() if answer is None else (*_request_messages(last), answer),
            tools=_objects(_decoded(last.request_json).get("tools")),
        )


def _family(call: ModelCall) -> tuple[str, str, str, float | None]:
    """Calls of different families never share a row: the loss needs one policy and one temperature for each."""
    return call.agent_name, call.policy, call.model, call.temperature


def _why_dropped(call: ModelCall, *, orphan: bool) -> DropReason | None:
    if orphan or call.client_gone:
        return DropReason.ORPHANED
    if not call.usable:
        return DropReason.UNUSABLE
    if not call.policy or not call.completion:
        return DropReason.NOT_TRAINABLE
    return None


def _orphans(calls: Sequence[ModelCall]) -> set[int]:
    """Returns the positions of calls whose answer the agent never saw, because its client sent the request again.

    A client that resends counts (`http.request.resend_count`): the resend with count n replaces the nearest n earlier
    calls with the same request. Equal requests that are no resends are several samples, and stay.
    """
    orphans: set[int] = set()
    for index, call in enumerate(calls):
        left = call.resend_count
        for earlier in range(index - 1, -1, -1):
            if not left:
                break
            other = calls[earlier]
            if other.request_json == call.request_json and other.resend_count < call.resend_count:
                orphans.add(earlier)
                left -= 1
    return orphans


def _decompressed(chunk: SpanChunk) -> bytes:
    match chunk.codec:
        case SpanCodec.SPAN_CODEC_IDENTITY:
            return chunk.payload
        case SpanCodec.SPAN_CODEC_ZSTD:
            try:
                return zstandard.ZstdDecompressor().decompress(chunk.payload, max_output_size=MAX_BATCH_BYTES)
            except zstandard.ZstdError as error:
                raise ModelCallInvalid(f"Span chunk {chunk.chunk_id} cannot be decompressed: {error}") from error
        case _:
            raise ModelCallInvalid(f"Span chunk {chunk.chunk_id} has the unknown codec {chunk.codec}.")


def _common_prefix_entries(one: bytes, other: bytes) -> int:
    ids, other_ids = unpack_token_ids(one), unpack_token_ids(other)
    for index, (left, right) in enumerate(zip(ids, other_ids, strict=False)):
        if left != right:
            return index
    return min(len(ids), len(other_ids))


def _decoded(document: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(document) if document else {}
    except ValueError as error:
        raise ModelCallInvalid("A recorded request or answer is not JSON.") from error
    return value if isinstance(value, dict) else {}


def _objects(value: object) -> Messages:
    return tuple(item for item in value if isinstance(item, dict)) if isinstance(value, list) else ()


def _request_messages(call: ModelCall) -> Messages:
    return _objects(_decoded(call.request_json).get("messages"))


def _answer_message(call: ModelCall) -> Mapping[str, Any] | None:
    choices = _objects(_decoded(call.response_json).get("choices"))
    message = choices[0].get("message") if choices else None
    return message if isinstance(message, dict) else None


def _same_answer(answer: Mapping[str, Any], repeated: Mapping[str, Any]) -> bool:
    """Tells whether a message of a request repeats an answer; absent, null and empty fields are the same."""
    return repeated.get("role") == "assistant" and all(
        (answer.get(key) or None) == (repeated.get(key) or None) for key in ("content", "tool_calls")
    )
