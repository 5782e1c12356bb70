"""Extracts the capture from a chat completion on its way to the agent.

Invariant: fields unknown to the proxy reach the agent byte for byte; fields that only the proxy requested do not reach
it. Only the outline is decoded: token ids and log-probabilities stay slices until the agent has its answer.
"""

from __future__ import annotations

import re

import msgspec

from fulmen_llm_proxy.apis.api import ABSENT, NULL, decode_fields, encode, given
from fulmen_llm_proxy.apis.collected import Asked, Collected, Fields
from fulmen_llm_proxy.apis.sse import DONE, encode_event, event_data

_CHOICES = msgspec.json.Decoder(list[Fields])
_INDEX = msgspec.json.Decoder(int)
_FINISH = msgspec.json.Decoder(str | None)
_DIGITS = re.compile(rb'"\d{1,18}"')
_UNUSUAL_DOCUMENTS = 4
"""Documents with unusual fields after which the fast path is no longer tried."""


class _Choice(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    index: int
    delta: msgspec.Raw = ABSENT
    message: msgspec.Raw = ABSENT
    text: msgspec.Raw = ABSENT
    logprobs: msgspec.Raw = ABSENT
    finish_reason: str | msgspec.UnsetType | None = msgspec.UNSET
    stop_reason: msgspec.Raw = ABSENT
    token_ids: msgspec.Raw = ABSENT


class _Document(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """An answer or event with usual fields only, which is read at half the cost."""

    id: msgspec.Raw
    object: msgspec.Raw
    created: msgspec.Raw
    model: msgspec.Raw
    choices: list[_Choice]
    service_tier: msgspec.Raw = ABSENT
    system_fingerprint: msgspec.Raw = ABSENT
    usage: msgspec.Raw = ABSENT
    prompt_logprobs: msgspec.Raw = ABSENT
    prompt_token_ids: msgspec.Raw = ABSENT
    kv_transfer_params: msgspec.Raw = ABSENT


_USUAL = msgspec.json.Decoder(_Document).decode


class ChatReader:
    """Extracts the capture from one answer."""

    __slots__ = ("_asked", "_unusual", "collected")

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._unusual = 0
        self.collected = Collected()

    def whole(self, body: bytes) -> bytes:
        """Returns the complete answer for the agent, and keeps the capture."""
        stripped = self._document(body, chunk=False)
        self.collected.complete = not self.collected.malformed
        return body if stripped is None else stripped

    def event(self, event: bytes) -> bytes:
        """Returns an event for the agent; empty if it contains only captured fields."""
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

    def end(self) -> bytes:
        """Returns nothing: the stream has its own last event."""
        return b""

    def _document(self, data: bytes, *, chunk: bool) -> bytes | None:
        """Strips a JSON document; returns None if it passes unchanged, empty if nothing is left."""
        if self._unusual < _UNUSUAL_DOCUMENTS:
            try:
                document = _USUAL(data)
            except ValueError:
                self._unusual += 1
            else:
                return self._usual(document, data, hide_usage=chunk and not self._asked.stream_usage)
        return self._any(data, chunk=chunk)

    def _usual(self, document: _Document, data: bytes, *, hide_usage: bool) -> bytes | None:
        collected, touched = self.collected, False
        if collected.named is None:
            collected.named = (document.id, document.model)
        if document.prompt_token_ids is not ABSENT:
            if given(document.prompt_token_ids):
                collected.prompt_ids = document.prompt_token_ids
            if not self._asked.token_ids:
                document.prompt_token_ids, touched = ABSENT, True
        if document.usage is not ABSENT:
            has_usage = given(document.usage)
            if has_usage:
                collected.usage.append(document.usage)
            if hide_usage:
                if has_usage and not document.choices:
                    return b""
                document.usage, touched = ABSENT, True
        for choice in document.choices:
            touched |= self._extract_usual_choice(choice)
        if touched:
            data = encode(document)
        collected.payloads.append(data)
        return data if touched else None

    def _extract_usual_choice(self, choice: _Choice) -> bool:
        kept, touched = self.collected.choice(choice.index), False
        if choice.token_ids is not ABSENT:
            kept.token_ids.append(choice.token_ids)
            if not self._asked.token_ids:
                choice.token_ids, touched = ABSENT, True
        if choice.logprobs is not ABSENT and given(choice.logprobs):
            kept.logprobs.append(choice.logprobs)
            if not self._asked.logprobs:
                choice.logprobs, touched = NULL, True
        if choice.finish_reason:
            kept.finish_reason = choice.finish_reason
        return touched

    def _any(self, data: bytes, *, chunk: bool) -> bytes | None:
        collected = self.collected
        try:
            fields = decode_fields(data)
            usages = len(collected.usage)
            changed = self._extract_top_level(fields, hide_usage=chunk and not self._asked.stream_usage)
            raw_choices = fields.get("choices")
            choices = [] if raw_choices is None else _CHOICES.decode(raw_choices)
            touched = False
            for choice in choices:
                touched |= self._extract_choice(choice)
        except ValueError:  # not JSON, not UTF-8, or of the wrong type
            collected.malformed = True
            collected.payloads.append(data)
            return None
        if (
            chunk
            and "usage" not in fields
            and len(collected.usage) > usages
            and raw_choices is not None
            and not choices
        ):
            return b""  # the chunk with the usage only, which the agent did not ask for
        if not (changed or touched):
            collected.payloads.append(data)
            return None
        if touched:
            fields["choices"] = msgspec.Raw(encode(choices))
        stripped = encode(fields)
        collected.payloads.append(stripped)
        return stripped

    def _extract_top_level(self, fields: Fields, *, hide_usage: bool) -> bool:
        collected, changed = self.collected, False
        if collected.named is None:
            collected.named = (fields.get("id"), fields.get("model"))
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
                collected.usage.append(usage)
            if hide_usage:
                del fields["usage"]
                changed = True
        versions = fields.get("weight_versions")
        if versions is not None and bytes(versions) != b"null":
            collected.weight_versions = versions
        metadata = fields.get("metadata")
        if metadata is not None:
            self._extract_metadata(metadata)
        if "error" in fields:
            collected.error = True
        return changed

    def _extract_metadata(self, metadata: msgspec.Raw) -> None:
        """Extracts the version at the end of the answer, which SGLang reports as a string chosen by the trainer."""
        if bytes(metadata) != b"null":
            version = decode_fields(metadata).get("weight_version")
            if version is not None and _DIGITS.fullmatch(bytes(version)):
                self.collected.end_version = version

    def _extract_choice(self, choice: Fields) -> bool:
        raw_index = choice.get("index")
        kept = self.collected.choice(0 if raw_index is None else _INDEX.decode(raw_index))
        touched = False
        token_ids = choice.get("token_ids")
        if token_ids is not None:
            kept.token_ids.append(token_ids)
            if not self._asked.token_ids:
                del choice["token_ids"]
                touched = True
        prompt_ids = choice.get("prompt_token_ids")
        if prompt_ids is not None:
            if bytes(prompt_ids) != b"null":
                kept.prompt_ids = prompt_ids
            if not self._asked.token_ids:
                del choice["prompt_token_ids"]
                touched = True
        logprobs = choice.get("logprobs")
        if logprobs is not None and bytes(logprobs) != b"null":
            kept.logprobs.append(logprobs)
            if not self._asked.logprobs:
                choice["logprobs"] = NULL
                touched = True
        finish = choice.get("finish_reason")
        if finish is not None:
            kept.finish_reason = _FINISH.decode(finish) or kept.finish_reason
        versions = choice.get("weight_versions")
        if versions is not None and bytes(versions) != b"null":
            kept.weight_versions = versions
        experts = choice.get("routed_experts")
        if experts is not None and bytes(experts) != b"null":
            # Not requested by the agent, but by the engine's operator or the run.
            kept.routed_experts = experts
            del choice["routed_experts"]
            touched = True
        return touched
