"""What a backend's answer becomes: the bytes the agent gets, and the raw pieces of the capture.

Invariant: a field that the proxy does not know reaches the agent byte for byte, and a field that
the proxy asked for on its own account does not reach the agent. Nothing is decoded here beyond the
outlines: token ids and log-probabilities stay slices of the answer until the agent has its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from fulmen_llm_proxy.domain.sse import DONE, encode_event, event_data

Fields = dict[str, msgspec.Raw]

_FIELDS = msgspec.json.Decoder(Fields)
_CHOICES = msgspec.json.Decoder(list[Fields])
_INDEX = msgspec.json.Decoder(int)
_FINISH = msgspec.json.Decoder(str | None)
_ENCODER = msgspec.json.Encoder()
_NULL = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the agent itself asked for, and therefore keeps in its answer."""

    token_ids: bool = False
    logprobs: bool = False
    stream_usage: bool = False


@dataclass(slots=True, kw_only=True)
class CollectedChoice:
    """The slices of one choice, in the order in which they came."""

    token_ids: list[msgspec.Raw] = field(default_factory=list)
    logprobs: list[msgspec.Raw] = field(default_factory=list)
    finish_reason: str | None = None
    weight_versions: msgspec.Raw | None = None


@dataclass(slots=True, kw_only=True)
class Collected:
    """Everything one answer brought, not yet decoded.

    Attributes:
        payloads: JSON documents that the agent received: the answer, or each event of the stream.
        complete: the answer ended as its protocol says (whole body, or the stream's last event).
        malformed: part of the answer was not the JSON that the OpenAI API promises.
        error: the backend reported an error within the stream.
        streamed: `payloads` are the events of a stream.
    """

    prompt_ids: msgspec.Raw | None = None
    usage: msgspec.Raw | None = None
    weight_versions: msgspec.Raw | None = None
    choices: dict[int, CollectedChoice] = field(default_factory=dict)
    payloads: list[bytes] = field(default_factory=list)
    complete: bool = False
    malformed: bool = False
    error: bool = False
    streamed: bool = False

    def choice(self, index: int) -> CollectedChoice:
        """Returns the collected choice of that index, new on first use."""
        found = self.choices.get(index)
        if found is None:
            found = self.choices[index] = CollectedChoice()
        return found


class AnswerFilter:
    """Takes the capture out of an answer on its way to the agent; one object per call."""

    __slots__ = ("_asked", "collected")

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self.collected = Collected()

    def answer(self, body: bytes) -> bytes:
        """Returns the whole answer as the agent should see it, and keeps the capture."""
        stripped = self._document(body, chunk=False)
        self.collected.complete = not self.collected.malformed
        return body if stripped is None else stripped

    def event(self, event: bytes) -> bytes:
        """Returns one stream event as the agent should see it; empty when it is all capture."""
        self.collected.streamed = True
        data = event_data(event)
        if data is None:
            return event
        if data == DONE:
            self.collected.complete = True
            return event
        stripped = self._document(data, chunk=True)
        if stripped is None:
            return event
        return encode_event(stripped) if stripped else b""

    def _document(self, data: bytes, *, chunk: bool) -> bytes | None:
        """Strips one JSON document; None when it may pass as it is, empty when nothing is left."""
        collected = self.collected
        try:
            fields = _FIELDS.decode(data)
            changed = self._take_top_level(fields, hide_usage=chunk and not self._asked.stream_usage)
            raw_choices = fields.get("choices")
            choices = [] if raw_choices is None else _CHOICES.decode(raw_choices)
            touched = False
            for choice in choices:
                touched |= self._take_choice(choice)
        except msgspec.DecodeError:
            collected.malformed = True
            collected.payloads.append(data)
            return None
        if chunk and changed and raw_choices is not None and not choices:
            return b""  # the chunk that only brings the usage, which the agent did not ask for
        if not (changed or touched):
            collected.payloads.append(data)
            return None
        if touched:
            fields["choices"] = msgspec.Raw(_ENCODER.encode(choices))
        stripped = _ENCODER.encode(fields)
        collected.payloads.append(stripped)
        return stripped

    def _take_top_level(self, fields: Fields, *, hide_usage: bool) -> bool:
        collected, changed = self.collected, False
        prompt_ids = fields.get("prompt_token_ids")
        if prompt_ids is not None:
            if bytes(prompt_ids) != b"null":
                collected.prompt_ids = prompt_ids
            if not self._asked.token_ids:
                del fields["prompt_token_ids"]
                changed = True
        usage = fields.get("usage")
        if usage is not None:
            if bytes(usage) != b"null":
                collected.usage = usage
            if hide_usage:
                del fields["usage"]
                changed = True
        versions = fields.get("weight_versions")
        if versions is not None and bytes(versions) != b"null":
            collected.weight_versions = versions
        if "error" in fields:
            collected.error = True
        return changed

    def _take_choice(self, choice: Fields) -> bool:
        raw_index = choice.get("index")
        kept = self.collected.choice(0 if raw_index is None else _INDEX.decode(raw_index))
        touched = False
        token_ids = choice.get("token_ids")
        if token_ids is not None:
            kept.token_ids.append(token_ids)
            if not self._asked.token_ids:
                del choice["token_ids"]
                touched = True
        logprobs = choice.get("logprobs")
        if logprobs is not None and bytes(logprobs) != b"null":
            kept.logprobs.append(logprobs)
            if not self._asked.logprobs:
                choice["logprobs"] = _NULL
                touched = True
        finish = choice.get("finish_reason")
        if finish is not None:
            kept.finish_reason = _FINISH.decode(finish) or kept.finish_reason
        versions = choice.get("weight_versions")
        if versions is not None and bytes(versions) != b"null":
            kept.weight_versions = versions
        return touched
