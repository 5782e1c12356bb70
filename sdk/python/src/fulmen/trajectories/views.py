"""Other views of a trajectory: triplets for trainers of single calls, conversations for people and SFT.

Invariant: a view contains recorded data only; ids are never made from texts, nor texts from ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fulmen.model_call import ModelCall, VersionRange, unpack_logprobs, unpack_token_ids
from fulmen.trajectories.calls import DropReason
from fulmen.trajectories.chat import Message, Messages, answer_message, offered_tools, request_messages
from fulmen.trajectories.credit import CreditedRow
from fulmen.trajectories.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Triplet:
    """One model call: prompt, response and credit.

    Attributes:
        prompt_ids: Token ids of the whole prompt.
        response_ids: Token ids of the sampled tokens.
        logprobs: Natural log-probabilities of the sampled tokens.
        versions: Policy versions by range of sampled tokens.
        prompt: The request as chat messages; empty if not recorded.
        response: The answer as a chat message; None if not recorded.
        reward: The call's credit; None without a counted reward.
        step: The agent step, or None.
        span_id: Id of the call's span.
    """

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRange, ...]
    prompt: Messages = field(repr=False)
    response: Message | None = field(repr=False)
    reward: float | None
    agent_name: str
    policy: str
    step: int | None
    span_id: bytes
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One complete conversation.

    Attributes:
        messages: Chat messages, the answer last.
        tools: The tools offered by its last call.
        reward: Credit of the last call; None if it has none or is in no row.
        is_trainable: Whether its last call is in a row; other calls were captured without all their tokens.
        span_id: Id of the last call's span.
    """

    messages: Messages
    tools: Messages
    agent_name: str
    reward: float | None
    finish_reason: str
    is_trainable: bool
    span_id: bytes


def triplets(rows: Sequence[CreditedRow]) -> tuple[Triplet, ...]:
    """Returns the calls of rows as triplets, in order of start.

    Raises:
        ModelCallInvalid: If a recorded request or answer is not JSON.
    """
    found = [
        (each.call.start_time_ns, each.call.choice, each.call.span_id, each, credit)
        for row in rows
        for each, credit in zip(row.scored.row.calls, row.credits, strict=True)
    ]
    return tuple(
        Triplet(
            prompt_ids=tuple(unpack_token_ids(each.call.prompt)),
            response_ids=tuple(unpack_token_ids(each.call.completion)),
            logprobs=tuple(unpack_logprobs(each.call.logprobs)),
            versions=each.call.versions,
            prompt=request_messages(each.call),
            response=answer_message(each.call),
            reward=credit,
            agent_name=each.call.agent_name,
            policy=each.call.policy,
            step=each.step,
            span_id=each.call.span_id,
            finish_reason=each.call.finish_reason,
        )
        for *_, each, credit in sorted(found, key=lambda item: item[:3])
    )


def conversations(trajectory: Trajectory, rows: Sequence[CreditedRow] = ()) -> tuple[Conversation, ...]:
    """Returns the longest conversations of each agent, in order of the start of their last call.

    A conversation that is the beginning of another one of the same agent is omitted. Answers that cannot be trained on
    by token are included if the agent saw them to their end: their texts are complete. Graders' answers are not.

    Args:
        trajectory: The attempt's trajectory.
        rows: Its rows with credit; without them the conversations have no rewards.

    Raises:
        ModelCallInvalid: If a recorded request or answer is not JSON.
    """
    credit = {
        each.call.span_id: value for row in rows for each, value in zip(row.scored.row.calls, row.credits, strict=True)
    }
    calls = [(each.call, True) for row in trajectory.rows for each in row.calls]
    calls += [(each.call, False) for each in trajectory.dropped if _was_seen(each.call, each.reason)]
    found = []
    for call, is_trainable in sorted(calls, key=lambda item: (item[0].start_time_ns, item[0].choice, item[0].span_id)):
        answer = answer_message(call)
        if answer is None:
            continue
        found.append(
            Conversation(
                messages=(*request_messages(call), answer),
                tools=offered_tools(call),
                agent_name=call.agent_name,
                reward=credit.get(call.span_id),
                finish_reason=call.finish_reason,
                is_trainable=is_trainable,
                span_id=call.span_id,
            )
        )
    return _longest(found)


def transcript(messages: Messages) -> str:
    """Renders a conversation for a person: roles and texts, tool calls, and the positions of images."""
    return "\n".join(line for message in messages for line in _lines(message))


def _was_seen(call: ModelCall, reason: DropReason) -> bool:
    return reason is DropReason.UNUSABLE and bool(call.finish_reason)


def _longest(found: Sequence[Conversation]) -> tuple[Conversation, ...]:
    begun: set[tuple[str, int]] = set()
    kept: list[int] = []
    for index in sorted(range(len(found)), key=lambda place: -len(found[place].messages)):
        agent, chain = found[index].agent_name, list(_chain(found[index].messages))
        if (agent, chain[-1]) in begun:
            continue
        kept.append(index)
        begun.update((agent, each) for each in chain)
    return tuple(found[index] for index in sorted(kept))


def _chain(messages: Messages) -> Iterator[int]:
    """Yields a number for each beginning of a conversation; equal beginnings have equal numbers.

    Agents omit the model's reasoning when they repeat an answer, and write missing content as null, empty or not at
    all; such differences do not count.
    """
    value = 0
    for message in messages:
        said = [message.get("role"), message.get("tool_call_id")]
        said += [message.get(key) or None for key in ("content", "tool_calls")]
        value = hash((value, json.dumps(said, sort_keys=True)))
        yield value


def _lines(message: Message) -> Iterator[str]:
    who = str(message.get("role", "?"))
    if message.get("tool_call_id"):
        who += f" {message['tool_call_id']}"
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        yield f"{who} thinks: {reasoning}"
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(map(_part_text, content))
    if content:
        yield f"{who}: {content}"
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield f"{who} calls {function.get('name', '?')}({function.get('arguments', '')})"


def _part_text(part: object) -> str:
    match part:
        case {"text": str(text)}:
            return text
        case {"type": str(kind)}:
            return f"[{kind}]"
        case _:
            return str(part)
