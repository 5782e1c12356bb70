"""What an answer brought, as slices of its bytes; nothing is decoded until the agent has its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

Fields = dict[str, msgspec.Raw]
"""The fields of a JSON object, each an undecoded slice."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the agent itself asked for, and therefore keeps in its answer."""

    token_ids: bool = False
    logprobs: bool = False
    stream_usage: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChange:
    """A new policy version of a call's target, while the call ran.

    Attributes:
        pieces: how many pieces of token ids had come by then, by choice; a choice without any is absent.
    """

    version: int
    pieces: Mapping[int, int]


@dataclass(slots=True, kw_only=True)
class CollectedChoice:
    """The slices of one choice, in the order in which they came.

    Attributes:
        prompt_ids: of this choice's own prompt, where an API has one for each choice.
    """

    token_ids: list[msgspec.Raw] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)
    finish_reason: str | None = None
    weight_versions: msgspec.Raw | None = None
    prompt_ids: msgspec.Raw | None = None


@dataclass(slots=True, kw_only=True)
class Collected:
    """Everything one answer brought, not yet decoded.

    Attributes:
        named: the answer's own `id` and `model`, from a reader that had them at hand.
        end_version: the backend's policy version at the end of a whole answer, as the backend says.
        policy_changes: new policy versions of the call's target while it ran, in order.
        usage: the usage objects of the answer, in order; a later one adds to and corrects an earlier one.
        payloads: JSON documents of the backend without what only the capture asked for: the answer, or each event
            of the stream.
        complete: the answer ended as its protocol says (whole body, or the stream's last event).
        malformed: part of the answer was not the JSON that its API promises.
        error: the backend reported an error within the stream.
        streamed: `payloads` are the events of a stream.
        sequence: the number of the stream's next event, in an API that numbers them.
    """

    named: tuple[msgspec.Raw | None, msgspec.Raw | None] | None = None
    prompt_ids: msgspec.Raw | None = None
    usage: list[msgspec.Raw] = field(default_factory=list)
    weight_versions: msgspec.Raw | None = None
    end_version: msgspec.Raw | None = None
    policy_changes: list[PolicyChange] = field(default_factory=list)
    choices: dict[int, CollectedChoice] = field(default_factory=dict)
    payloads: list[bytes] = field(default_factory=list)
    complete: bool = False
    malformed: bool = False
    error: bool = False
    streamed: bool = False
    sequence: int = 0

    def choice(self, index: int) -> CollectedChoice:
        """Returns the collected choice of that index, new on first use."""
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = CollectedChoice()
        return found
