"""Triplets out of exported spans: the same as from Agent Lightning's adapters.

Source: `TracerTraceToTriplet` and `LlmProxyTraceToTriplet` of agentlightning 0.3.0, `agentlightning/adapter/triplet.py`. They are for
data that was exported there. Fulmen itself makes triplets of captured calls (`fulmen.trajectories.triplets`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulmen.compat.agentlightning.attributes import AGL_OPERATION, AGL_REWARD, OPERATION_NAME, nested, reward_in
from fulmen.compat.agentlightning.exported_spans import ExportedSpan, SpanNode, SpansInvalid, read_spans, span_tree
from fulmen.compat.agentlightning.free_calls import FreeCalls
from fulmen.compat.agentlightning.records import Triplet

if TYPE_CHECKING:
    from fulmen.client.trainers import Row

__all__ = ["LlmProxyTraceToTriplet", "RewardMatchPolicy", "TraceToMessages", "TracerTraceToTriplet", "training_rows"]

_ANSWER_IDS = ("gen_ai.response.id", "agentlightning.operation.output.id")
_PROMPT_TOKENS = ("prompt_token_ids", "agentlightning.operation.output.prompt_token_ids")
_ANSWER_TOKENS = (
    "response_token_ids",
    "agentlightning.operation.output.response_token_ids.0",
    "agentlightning.operation.output.choices.0.token_ids",
    "agentlightning.operation.output.choices.0.provider_specific_fields.token_ids",
)
_Values = Mapping[int, float | None]
"""The reward of each span's node, by the node's identity."""
_AGENT_NAMES = ("agent.name", "recipient_agent_type", "langchain.chain.type", "executor.id")


class RewardMatchPolicy(StrEnum):
    """How rewards are matched with calls."""

    FIRST_SIBLING = "first_sibling"
    """A reward belongs to the last call before it below the same span."""

    FIRST_OCCURRENCE = "first_occurrence"
    """A reward belongs to the last call that ended before it."""


@contextmanager
def _attributes() -> Iterator[None]:
    """Raises SpansInvalid for what an attribute of another form leads to."""
    try:
        yield
    except SpansInvalid:
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        text = f"An attribute of a span has another form: {type(error).__name__}: {str(error)[:200]}"
        raise SpansInvalid(text) from None


class TracerTraceToTriplet:
    """Triplets of the spans of a tracer.

    Args:
        repair_hierarchy: Whether spans at the top are moved below those that enclose them in time.
        llm_call_match: Pattern of the names of model calls' spans.
        agent_match: Pattern of the agents whose calls count; None for all.
        exclude_llm_call_in_reward: Whether calls below a reward's span are left out.
        reward_match: How rewards are matched with calls.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str = r"openai\.chat\.completion",
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE,
        _skip_empty_token_spans: bool = False,
    ) -> None:
        self.repair_hierarchy = repair_hierarchy
        self.llm_call_match = llm_call_match
        self.agent_match = agent_match
        self.exclude_llm_call_in_reward = exclude_llm_call_in_reward
        self.reward_match = RewardMatchPolicy(reward_match)
        self._skip_empty_token_spans = _skip_empty_token_spans

    @_attributes()
    def adapt(self, source: str | Path | Iterable[Any], /) -> list[Triplet]:
        """Returns the triplets of one attempt, in the order of the tree.

        Raises:
            SpansInvalid: If a span is malformed, or they form no tree.
        """
        tree = span_tree(read_spans(source))
        if self.repair_hierarchy:
            tree.repair()
        values = {id(node): reward_in(node.name, node.attributes) for node in tree.walk()}
        found = [(node, _triplet(node, agent)) for node, agent in self._calls(tree, values)]
        if self._skip_empty_token_spans:
            found = [each for each in found if each[1].prompt["token_ids"] and each[1].response["token_ids"]]
        rewards = _matched(tree, {node.span_id for node, _ in found}, values, self.reward_match)
        return [replace(triplet, reward=rewards.get(node.span_id)) for node, triplet in found]

    def _calls(self, tree: SpanNode, values: _Values) -> list[tuple[SpanNode, str]]:
        found: list[tuple[SpanNode, str]] = []

        seen: set[str] = set()
        waiting: list[tuple[SpanNode, str | None, bool, bool]] = [
            (tree, "*" if self.agent_match is None else None, False, False)
        ]
        while waiting:
            node, agent, in_call, in_reward = waiting.pop()
            if agent is not None and not in_reward and re.search(self.llm_call_match, node.name):
                answer = _text(node.attributes, _ANSWER_IDS)
                if answer not in seen if answer is not None else not in_call:
                    found.append((node, agent))
                    seen |= set() if answer is None else {answer}
                    in_call = True
            name = _agent_name(node)
            if name is not None:
                agent = name if self.agent_match is None or re.search(self.agent_match, name) else None
            in_reward = in_reward or (self.exclude_llm_call_in_reward and _is_reward(node, values))
            waiting += [(child, agent, in_call, in_reward) for child in reversed(node.children)]
        return found


def _agent_name(node: SpanNode) -> str | None:
    """Returns the name of the agent whose span it is, as its framework writes it."""
    held = node.attributes
    if (name := held.get("agent.name")) is not None:
        return str(name)
    if held.get("agentops.span.kind") == "agent" and (name := held.get("operation.name")) is not None:
        return str(name)
    for key in _AGENT_NAMES[1:]:
        if (name := held.get(key)) is not None:
            return str(name)
    if held.get("type") == "agent" and (name := held.get("agentlightning.operation.input.name")) is not None:
        return str(name)
    return held.get("lc_name") if node.name.startswith("langchain.Chain.") else None


def _is_reward(node: SpanNode, values: _Values) -> bool:
    if values[id(node)] is not None:
        return True
    return node.name == AGL_OPERATION and node.attributes.get(OPERATION_NAME) == AGL_REWARD


def _matched(tree: SpanNode, calls: set[str], values: _Values, policy: RewardMatchPolicy) -> dict[str, float]:
    """Returns the reward of each call: that of the first reward after it for which no later call is free."""
    if policy is RewardMatchPolicy.FIRST_OCCURRENCE:
        return _assigned(sorted(tree.walk(), key=lambda node: node.start_s), calls, values, {})
    rewards: dict[str, float] = {}
    for node in tree.walk():
        _assigned(node.children, calls, values, rewards)
    return rewards


def _assigned(
    nodes: Sequence[SpanNode], calls: set[str], values: _Values, rewards: dict[str, float]
) -> dict[str, float]:
    free = FreeCalls(sum(node.span_id in calls for node in nodes))
    for node in nodes:
        if node.span_id in calls:
            free.add(node)
        value = values[id(node)]
        if value is None:
            continue
        while (call := free.take(node.start_s)) is not None:
            if call.span_id not in rewards:
                rewards[call.span_id] = value
                break
    return rewards


def _triplet(node: SpanNode, agent: str) -> Triplet:
    held = node.attributes
    request = _nested(held, ("gen_ai.request", "agentlightning.operation.input"))
    response = _nested(held, ("gen_ai.response", "agentlightning.operation.output"))
    for value, keys in ((request, ("messages",)), (response, ("choices", "prompt_token_ids", "response_token_ids"))):
        for key in keys if isinstance(value, dict) else ():
            value.pop(key, None)
    asked = _nested(held, ("gen_ai.prompt", "agentlightning.operation.input.messages"))
    answered = _nested(held, ("gen_ai.completion", "agentlightning.operation.output.choices"))
    reply: dict[str, Any] = {"token_ids": _integers(held, _ANSWER_TOKENS), "raw_content": answered}
    if isinstance(logprobs := held.get("logprobs.content"), str):
        reply["logprobs"] = json.loads(logprobs)
    return Triplet(
        prompt={
            "token_ids": _integers(held, _PROMPT_TOKENS),
            "raw_content": asked,
            "image_urls": _images(asked),
        },
        response=reply,
        metadata={
            "request": request,
            "response": response,
            "response_id": _text(held, _ANSWER_IDS),
            "agent_name": agent,
        },
    )


def _text(attributes: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    return next((attributes[key] for key in keys if isinstance(attributes.get(key), str)), None)


def _integers(attributes: Mapping[str, Any], keys: Sequence[str]) -> list[int]:
    for key in keys:
        value = attributes.get(key)
        if isinstance(value, list | tuple) and all(isinstance(each, int) for each in value):
            return list(value)
    return []


def _nested(attributes: Mapping[str, Any], prefixes: Sequence[str]) -> Any:
    return next((found for prefix in prefixes if (found := nested(attributes, prefix))), None)


def _images(asked: Any) -> list[str]:
    """Returns the addresses of the images in a prompt, in order."""
    if isinstance(asked, dict):
        numbered = sorted((key for key in asked if key.isdigit()), key=int)
        asked = [asked[key] for key in numbered] if numbered else [asked]
    found = []
    for message in asked or ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            try:
                content = json.loads(content)
            except json.JSONDecodeError:
                continue
        for part in content if isinstance(content, list) else ():
            image = part.get("image_url") if isinstance(part, dict) and part.get("type") == "image_url" else None
            if isinstance(image, dict) and "url" in image:
                found.append(image["url"])
    return found


class LlmProxyTraceToTriplet:
    """Triplets of the spans of Agent Lightning's LLM proxy, in the order of `sequence_id`; its clocks do not count."""

    @_attributes()
    def adapt(self, source: str | Path | Iterable[Any], /) -> list[Triplet]:
        """Returns the triplets of one attempt.

        Raises:
            SpansInvalid: If a span is malformed.
        """
        spans = sorted(read_spans(source), key=lambda span: (span.sequence_id, span.start_s))
        calls: list[tuple[ExportedSpan, list[int], list[int], str | None]] = []
        seen: set[str] = set()
        for span in spans:
            prompt, answer = _proxy_tokens(span)
            ids = span.attributes.get("gen_ai.response.id") or span.attributes.get("llm.hosted_vllm.id")
            answer_id = ids if isinstance(ids, str) and ids else None
            if prompt and answer and answer_id not in seen:
                seen |= set() if answer_id is None else {answer_id}
                calls.append((span, prompt, answer, answer_id))
        rewards = _by_place(spans, [call for call, *_ in calls])
        return [
            Triplet(
                prompt={"token_ids": prompt},
                response={"token_ids": answer},
                reward=rewards.get(span.span_id),
                metadata={"response_id": answer_id},
            )
            for span, prompt, answer, answer_id in calls
        ]


def _by_place(spans: Sequence[ExportedSpan], calls: Sequence[ExportedSpan]) -> dict[str, float]:
    """Returns the reward of each call: that of the first reward behind it for which no later call is free; both are in order."""
    rewards: dict[str, float] = {}
    free: list[str] = []
    met = 0
    for span in spans:
        while met < len(calls) and calls[met].sequence_id < span.sequence_id:
            free.append(calls[met].span_id)
            met += 1
        value = reward_in(span.name, span.attributes)
        while value is not None and free:
            if (call_id := free.pop()) not in rewards:
                rewards[call_id] = value
                break
    return rewards


def _proxy_tokens(span: ExportedSpan) -> tuple[list[int], list[int]]:
    held = span.attributes
    if span.name == "litellm_request":
        return _as_integers(held.get("prompt_token_ids")), _as_integers(held.get("response_token_ids"))
    if span.name != "raw_gen_ai_request":
        return [], []
    answers = _literal(held.get("llm.hosted_vllm.response_token_ids"))
    answer = _as_integers(answers[0]) if isinstance(answers, list) and answers else []
    if not answer:
        choices = _literal(held.get("llm.hosted_vllm.choices"))
        first = choices[0] if isinstance(choices, list) and choices else None
        answer = _as_integers(first.get("token_ids")) if isinstance(first, dict) else []
    return _as_integers(held.get("llm.hosted_vllm.prompt_token_ids")), answer


def _literal(value: Any) -> Any:
    """Returns what a text stands for as a Python literal, which LiteLLM writes lists as."""
    if not isinstance(value, str):
        return value
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return value


def _as_integers(value: Any) -> list[int]:
    found = _literal(value)
    return list(found) if isinstance(found, list | tuple) and all(isinstance(each, int) for each in found) else []


class TraceToMessages:
    """Stands for theirs in `Trainer(adapter=...)`. Fulmen's `apo` reads conversations by itself."""


def training_rows(triplets: Iterable[Triplet], advantages: Iterable[float]) -> list[Row]:
    """Returns triplets as rows of a trainer (`client.trainer`), each with one advantage for all tokens of its answer.

    Triplets without token ids, or without recorded log-probabilities of all tokens, have no log-probabilities in their row: train
    them by `reinforce` or `cross_entropy`.
    """
    from fulmen.client.trainers import Row

    rows = []
    for triplet, advantage in zip(triplets, advantages, strict=True):
        prompt, answer = triplet.prompt["token_ids"], triplet.response["token_ids"]
        content = triplet.response.get("logprobs") or ()
        logprobs = [float(each["logprob"]) for each in content if isinstance(each, Mapping) and "logprob" in each]
        before = [0.0] * len(prompt)
        rows.append(
            Row(
                token_ids=[*prompt, *answer],
                weights=[*before, *[1.0] * len(answer)],
                advantages=[*before, *[float(advantage)] * len(answer)],
                sampler_logprobs=[*before, *logprobs] if len(logprobs) == len(answer) else (),
            )
        )
    return rows
