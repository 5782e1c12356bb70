"""What binds a call to the place where its prompt is cached.

Invariant: nothing is computed before it is asked for; a call on a route with one target asks for nothing.
"""

from __future__ import annotations

import random
import re
from itertools import islice

import msgspec

from fulmen_llm_proxy.apis.collected import Fields
from fulmen_llm_proxy.routing.balancing import key_of

_SYSTEM_FIELDS = ("system", "instructions")
_PROMPT_FIELDS = ("messages", "input", "prompt")
_ROLE = re.compile(rb'"role"')
_MESSAGES = 2
"""So many messages make the beginning of a conversation: what the siblings of a rollout group share."""

_TEXT_BYTES = 512
"""Of a prompt that is no conversation."""

_MOST_BYTES = 2048


class CallAffinity:
    """The keys of one call."""

    __slots__ = ("_attempt", "_attempt_key", "_fields", "_prefix_key")

    def __init__(self, attempt: str | None, fields: Fields) -> None:
        """Takes the attempt's name, None for a call of nobody's, and the request's fields."""
        self._attempt = attempt
        self._fields = fields
        self._attempt_key: int | None = None
        self._prefix_key: int | None = None

    @property
    def attempt(self) -> int:
        """Equal for all calls of one attempt; at random for a call of nobody's."""
        if self._attempt_key is None:
            self._attempt_key = random.getrandbits(64) if self._attempt is None else key_of(self._attempt.encode())
        return self._attempt_key

    @property
    def prefix(self) -> int:
        """Equal for all calls whose prompts begin alike."""
        if self._prefix_key is None:
            self._prefix_key = key_of(prompt_beginning(self._fields))
        return self._prefix_key


def prompt_beginning(fields: Fields) -> bytes:
    """Returns what stands for the beginning of a prompt: its system text and its first messages, as they came.

    A conversation that goes on keeps its beginning, whatever is said later. Nothing is decoded: a message ends where the
    next one's `"role"` begins, which no string within a message can contain unescaped.
    """
    parts = [bytes(fields[name]) for name in _SYSTEM_FIELDS if name in fields]
    parts += [_first_messages(fields[name]) for name in _PROMPT_FIELDS if name in fields]
    beginning = b"\0".join(parts)
    if len(beginning) > _MOST_BYTES:
        half = _MOST_BYTES // 2
        return b"%d\0%b%b" % (len(beginning), beginning[:half], beginning[-half:])
    return beginning


def _first_messages(prompt: msgspec.Raw) -> bytes:
    roles = [found.start() for found in islice(_ROLE.finditer(prompt), _MESSAGES + 1)]
    if not roles:
        return bytes(memoryview(prompt)[:_TEXT_BYTES])
    # Up to the end of the message before the next one, or of the last one, without what closes the list.
    beginning = bytes(memoryview(prompt)[: roles[-1]] if len(roles) > _MESSAGES else prompt)
    return beginning[: beginning.rfind(b"}") + 1]
