"""A finished call of an app, as it is passed to the recording."""

from __future__ import annotations

import hashlib
import random

import msgspec

from fulmen_llm_proxy.apis.api import Api, ApiName
from fulmen_llm_proxy.apis.collected import Collected, Fields
from fulmen_llm_proxy.apis.usage import TokenCounts
from fulmen_llm_proxy.routing.table import Recording, Target

RECORDED_APIS = frozenset({ApiName.CHAT, ApiName.MESSAGES, ApiName.RESPONSES})
"""APIs whose calls are conversations."""


class AppCall(msgspec.Struct, frozen=True, kw_only=True):
    """A finished call that is to be recorded.

    Attributes:
        conversation: id of the conversation that the app named; empty if it named none.
        fields: fields of the app's request, in its own API.
        answer_api: API of the backend's answer.
        collected: slices of the answer; None without an answer.
        http_status: status of the answer to the app; 0 if it had disconnected.
        counts: tokens that the backend reported.
        cost_micros: cost of the call, micro-dollars.
        start_ns: start time, nanoseconds since 1970.
        size_bytes: approximate memory of the call while it waits.
    """

    recording: Recording
    project: str
    conversation: str
    model: str
    target: Target | None
    fields: Fields
    answer_api: Api
    collected: Collected | None
    http_status: int
    error_type: str
    counts: TokenCounts
    cost_micros: float
    start_ns: int
    elapsed_s: float
    size_bytes: int


def is_sampled(recording: Recording, project: str, conversation: str) -> bool:
    """Returns whether a call is recorded: of a conversation that the app names all calls are, or none."""
    if recording.sample_rate >= 1:
        return True
    if not conversation:
        return random.random() < recording.sample_rate
    digest = hashlib.sha256(f"{project}/{conversation}".encode()).digest()
    return int.from_bytes(digest[:8]) < recording.sample_rate * 2**64
