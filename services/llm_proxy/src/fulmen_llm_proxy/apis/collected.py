"""The parts of an answer as slices of its bytes; nothing is decoded before the agent has its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

Fields = dict[str, msgspec.Raw]
"""The fields of a JSON object, each an undecoded slice."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The optional parts of an answer that the caller has requested."""

    token_ids: bool = False
    logprobs: bool = False
    stream_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """A change of the target's policy version during a call.

    Attributes:
        pieces: number of pieces of token ids received before, by choice; choices without any are absent.
    """

    version: int
    pieces: Mapping[int, int]


class CollectedChoice(msgspec.Struct, kw_only=True):
    """The slices of a choice, in order of arrival.

    Attributes:
        prompt_ids: prompt token ids of this choice, in an API with one prompt per choice.
        routed_experts: experts that computed its tokens, base64 of a `.npy` file as JSON.
    """

    token_ids: list[msgspec.Raw] = []
    logprobs: list[msgspec.Raw] = []
    finish_reason: str | None = None
    weight_versions: msgspec.Raw | None = None
    prompt_ids: msgspec.Raw | None = None
    routed_experts: msgspec.Raw | None = None


class Collected(msgspec.Struct, kw_only=True):
    """The undecoded parts of an answer.

    Attributes:
        named: the answer's own `id` and `model`, if the reader has extracted them.
        end_version: policy version at the end of a complete answer, as the backend reports it.
        policy_changes: changes of the target's policy version during the call, in order.
        usage: usage objects in order; later ones override earlier ones.
        payloads: JSON documents of the backend, the answer or the stream's events, without what only the capture
            asked for.
        complete: whether the answer ended properly (complete body, or the stream's last event).
        malformed: whether part of the answer was not the JSON of its API.
        error: whether the backend reported an error within the stream.
        streamed: whether `payloads` are events of a stream.
        sequence: number of the stream's next event, in an API that numbers events.
    """

    named: tuple[msgspec.Raw | None, msgspec.Raw | None] | None = None
    prompt_ids: msgspec.Raw | None = None
    usage: list[msgspec.Raw] = []
    weight_versions: msgspec.Raw | None = None
    end_version: msgspec.Raw | None = None
    policy_changes: list[PolicyChange] = []
    choices: dict[int, CollectedChoice] = {}
    payloads: list[bytes] = []
    complete: bool = False
    malformed: bool = False
    error: bool = False
    streamed: bool = False
    sequence: int = 0

    def choice(self, index: int) -> CollectedChoice:
        """Returns the choice with this index; creates it on first use."""
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = CollectedChoice()
        return found
