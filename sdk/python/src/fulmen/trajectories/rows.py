"""Merges calls into rows, by token id.

Invariant: a row's tokens are the prompt and completion of its last call; a call continues a row if and only if its
prompt begins with all tokens of the row, so every sampled token is in one row.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fulmen.model_call import ENTRY_BYTES, ModelCall, ModelCallInvalid, VersionRange, unpack_token_ids
from fulmen.routed_experts import RoutedExperts, RoutedExpertsInvalid, merged
from fulmen.trajectories.chat import (
    Message,
    Messages,
    answer_message,
    has_reasoning,
    offered_tools,
    request_messages,
    same_answer,
)


class BreakReason(StrEnum):
    """Why a call of a known conversation began a new row.

    TEMPLATE: the chat template rendered the earlier turns differently. RETOKENISATION: the same answer came back as
    other token ids. OTHER: the agent itself did not continue its earlier conversation, but began another one or a
    branch.
    """

    TEMPLATE = "template"
    RETOKENISATION = "retokenisation"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCall:
    """A model call within a row.

    Attributes:
        call: The call, its arrays packed.
        start: Index of its first sampled token in the row's `response_ids`.
        end: Index after its last sampled token.
        step: Its agent step, from 0; None without one.
    """

    call: ModelCall
    start: int
    end: int
    step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A training sequence: a prompt and its continuation, whose sampled tokens are trained on.

    Attributes:
        prompt_ids: Token ids before the first sampled token.
        response_ids: R token ids from the first sampled token on.
        loss_mask: R flags; true where the policy sampled the token.
        logprobs: R natural log-probabilities under the sampling policy; 0.0 where the mask is false.
        versions: Policy versions by range of `response_ids`; they cover exactly the sampled tokens whose version is
            known or reported as 0.
        temperature: Sampling temperature of all its calls, unitless; None if unknown.
        agent_name: Calling agent or role; empty for the only one.
        policy: The trainable policy.
        finish_reason: Finish reason of the last call.
        calls: Its model calls, in order; together they cover exactly the sampled tokens.
        routed_experts: Experts that computed its tokens, counted from the start of the prompt; None if unknown.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRange, ...]
    temperature: float | None
    agent_name: str
    policy: str
    finish_reason: str
    calls: tuple[RowCall, ...] = field(repr=False)
    routed_experts: RoutedExperts | None = field(default=None, repr=False)

    @property
    def call_count(self) -> int:
        """Number of model calls."""
        return len(self.calls)

    @property
    def messages(self) -> Messages:
        """The conversation of the last call with its answer, as chat messages; empty if not recorded.

        Raises:
            ModelCallInvalid: If the record is not JSON.
        """
        answer = answer_message(self.calls[-1].call)
        return () if answer is None else (*request_messages(self.calls[-1].call), answer)

    @property
    def tools(self) -> Messages:
        """The tools offered by the last call.

        Raises:
            ModelCallInvalid: If the record is not JSON.
        """
        return offered_tools(self.calls[-1].call)

    def version_per_token(self, *, masked: int) -> tuple[int, ...]:
        """Returns the policy version of each response token; `masked` for unsampled tokens, 0 if unknown."""
        result = [0 if sampled else masked for sampled in self.loss_mask]
        for versions in self.versions:
            result[versions.start : versions.end] = [versions.version] * (versions.end - versions.start)
        return tuple(result)


Family = tuple[str, str, str, float | None]


def merge(calls: Sequence[ModelCall], steps: Sequence[int | None]) -> tuple[tuple[Row, ...], Counter[BreakReason]]:
    """Merges calls into rows, in order of their first calls, and counts why calls began further rows.

    A call continues the longest row that is a prefix of its prompt.

    Args:
        calls: Kept calls, in order of start.
        steps: Step of each call.
    """
    breaks: Counter[BreakReason] = Counter()
    families: dict[Family, list[_OpenRow]] = {}
    rows: list[_OpenRow] = []
    for call, step in zip(calls, steps, strict=True):
        family = families.setdefault(_family(call), [])
        longest: _OpenRow | None = None
        for row in family:
            if (longest is None or len(row.tokens) > len(longest.tokens)) and call.prompt.startswith(row.tokens):
                longest = row
        if longest is not None:
            longest.extend(call, step)
            continue
        if family:
            breaks[_break_reason(family, call)] += 1
        row = _OpenRow(call, step)
        family.append(row)
        rows.append(row)
    return tuple(row.close() for row in rows), breaks


def why_broken(previous: ModelCall, held: bytes, call: ModelCall) -> BreakReason:
    """Returns why a call does not continue a row.

    Args:
        previous: The row's last call.
        held: The row's packed tokens: prompt and response.
        call: A call whose prompt does not begin with `held`.

    Raises:
        ModelCallInvalid: If a recorded request or answer is not JSON.
    """
    return _why_broken(_Turn.of(previous), held, call, request_messages(call))


@dataclass(frozen=True, slots=True)
class _Turn:
    """The conversation up to a call, and its answer."""

    before: Messages
    answer: Message | None
    prompt_bytes: int

    @classmethod
    def of(cls, call: ModelCall) -> _Turn:
        return cls(request_messages(call), answer_message(call), len(call.prompt))


def _break_reason(family: Sequence[_OpenRow], call: ModelCall) -> BreakReason:
    """Compares a call with every row of the agent, latest first; the rows may be of several conversations."""
    now = request_messages(call)
    for row in reversed(family):
        reason = _why_broken(row.turn(), row.tokens, call, now)
        if reason is not BreakReason.OTHER:
            return reason
    return BreakReason.OTHER


def _why_broken(turn: _Turn, held: bytes, call: ModelCall, now: Messages) -> BreakReason:
    before, answer = turn.before, turn.answer
    if answer is None or len(now) <= len(before) or now[: len(before)] != before:
        return BreakReason.OTHER
    repeated = now[len(before)]
    if not same_answer(answer, repeated):
        return BreakReason.OTHER
    common = _common_prefix_entries(held, call.prompt)
    thinking_left_out = has_reasoning(answer) and not has_reasoning(repeated)
    # The last token ends the turn; the template may write another one there.
    at_the_end = common >= len(held) // ENTRY_BYTES - 1
    left_out = thinking_left_out or _leaves_something_out(
        held[common * ENTRY_BYTES :], call.prompt[common * ENTRY_BYTES :]
    )
    if common < turn.prompt_bytes // ENTRY_BYTES or at_the_end or left_out:
        return BreakReason.TEMPLATE
    return BreakReason.RETOKENISATION


@dataclass(slots=True, init=False)
class _OpenRow:
    tokens: bytes
    parts: list[tuple[ModelCall, int | None, int]]
    _turn: _Turn | None

    def __init__(self, call: ModelCall, step: int | None) -> None:
        self.tokens = call.prompt + call.completion
        self.parts = [(call, step, 0)]
        self._turn = None

    def extend(self, call: ModelCall, step: int | None) -> None:
        self.parts.append((call, step, (len(call.prompt) - len(self.tokens)) // ENTRY_BYTES))
        self.tokens = call.prompt + call.completion
        self._turn = None

    def turn(self) -> _Turn:
        if self._turn is None:
            self._turn = _Turn.of(self.parts[-1][0])
        return self._turn

    def close(self) -> Row:
        first, last = self.parts[0][0], self.parts[-1][0]
        # `struct.unpack` creates a tuple about twice as fast as an array.
        mask: list[bool] = []
        logprobs: list[float] = []
        versions: list[VersionRange] = []
        calls: list[RowCall] = []
        for call, step, added in self.parts:
            start = len(mask) + added
            end = start + len(call.completion) // ENTRY_BYTES
            mask += [False] * added + [True] * (end - start)
            logprobs += [0.0] * added
            logprobs += struct.unpack(f"<{end - start}f", call.logprobs)
            versions += [
                VersionRange(version=v.version, start=start + v.start, end=start + v.end) for v in call.versions
            ]
            calls.append(RowCall(call=call, start=start, end=end, step=step))
        ids = struct.unpack(f"<{len(self.tokens) // ENTRY_BYTES}i", self.tokens)
        prompt_count = len(first.prompt) // ENTRY_BYTES
        return Row(
            prompt_ids=ids[:prompt_count],
            response_ids=ids[prompt_count:],
            loss_mask=tuple(mask),
            logprobs=tuple(logprobs),
            versions=tuple(versions),
            temperature=first.temperature,
            agent_name=first.agent_name,
            policy=first.policy,
            finish_reason=last.finish_reason,
            calls=tuple(calls),
            routed_experts=_merged_experts([call for call, _, _ in self.parts]),
        )


def _merged_experts(calls: Sequence[ModelCall]) -> RoutedExperts | None:
    try:
        return merged(call.routed_experts for call in calls)
    except RoutedExpertsInvalid as error:
        raise ModelCallInvalid(str(error)) from error


def _family(call: ModelCall) -> Family:
    """Returns the family of a call. Calls of different families never share a row: the loss needs one policy and one
    temperature per row.
    """
    return call.agent_name, call.policy, call.model, call.temperature


def _leaves_something_out(held: bytes, now: bytes) -> bool:
    """Returns whether the new tokens continue with an end of the held ones: something was cut out, such as reasoning,
    and no text was returned as other tokens.
    """
    return any(now.startswith(held[place:]) for place in range(ENTRY_BYTES, len(held), ENTRY_BYTES))


def _common_prefix_entries(one: bytes, other: bytes) -> int:
    ids, other_ids = unpack_token_ids(one), unpack_token_ids(other)
    for index, (left, right) in enumerate(zip(ids, other_ids, strict=False)):
        if left != right:
            return index
    return min(len(ids), len(other_ids))
