"""In-memory cache of answers, for routes with `cached` set.

Invariant: a request hits only if its backend could not distinguish it from the first one. The key covers the caller's
project, the API, the variant with its backends, the forwarded headers, whether a stream is requested, and every field
of the backend's request except `IGNORED_FIELDS`, in any order. The cache stores the backend's own bytes, which are read
again for each caller.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from fulmen_llm_proxy.apis.api import UNREADABLE
from fulmen_llm_proxy.apis.collected import Collected
from fulmen_llm_proxy.backends.call_plan import CallPlan
from fulmen_llm_proxy.routing.table import Choice

IGNORED_FIELDS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"})
"""Fields that name the user or control the provider's caches; no token depends on them."""

STATEFUL_FIELDS = frozenset({"conversation", "background"})
"""Fields whose answer depends on more than the request; such answers are never cached."""

_IGNORED_HEADERS = frozenset({"traceparent", "tracestate", "idempotency-key", "x-client-request-id"})
_OVERHEAD_BYTES = 512
_LARGEST_SHARE = 8
"""An answer may take at most 1/8 of the cache."""

_sorted_json = msgspec.json.Encoder(order="sorted").encode


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedAnswer:
    """The bytes of an answer with status 200: the body, or all events of a stream."""

    content_type: bytes
    body: bytes
    expires_s: float


def cache_key(project: str, choice: Choice, plan: CallPlan, headers: Mapping[str, str]) -> bytes | None:
    """Returns the cache key of a request; None if its answer cannot be cached."""
    fields = plan.fields
    if not STATEFUL_FIELDS.isdisjoint(fields):
        return None
    counted = {name: raw for name, raw in fields.items() if name not in IGNORED_FIELDS}
    sent = {name.lower(): value for name, value in headers.items() if name.lower() not in _IGNORED_HEADERS}
    try:
        values = {name: msgspec.json.decode(raw) for name, raw in counted.items()}
    except UNREADABLE:
        return None
    document = _sorted_json(
        [
            project,
            plan.api.name,
            plan.stream,
            choice.target.model,
            choice.target.policy_version,
            # All backends of the variant, not the one that was chosen.
            sorted(backend.base_url for backend in choice.variant.backends),
            sent,
            values,
        ]
    )
    return hashlib.blake2b(document, digest_size=32).digest()


class AnswerCache:
    """An LRU cache of answers; owned by one event loop."""

    def __init__(self, *, max_bytes: int, ttl_s: float, clock: Callable[[], float]) -> None:
        """Creates an empty cache.

        Args:
            max_bytes: approximate memory limit; 0 disables the cache.
            ttl_s: lifetime of an entry, seconds.
            clock: monotonic clock, seconds.
        """
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._kept: OrderedDict[bytes, CachedAnswer] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: bytes) -> CachedAnswer | None:
        """Returns an unexpired answer, or None."""
        found = self._kept.get(key)
        if found is None:
            return None
        if found.expires_s <= self._clock():
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return found

    def keep(self, key: bytes, content_type: bytes, body: bytes, *, ttl_s: float = math.inf) -> None:
        """Stores an answer, replacing an older one, unless it is too large; for `ttl_s` at most."""
        size = _size(body)
        if size > self.max_answer_bytes:
            return
        self._drop(key)
        expires_s = self._clock() + min(ttl_s, self._ttl_s)
        self._kept[key] = CachedAnswer(content_type=content_type, body=body, expires_s=expires_s)
        self.size_bytes += size
        while self.size_bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    @property
    def max_answer_bytes(self) -> int:
        """Largest answer, bytes."""
        return self._max_bytes // _LARGEST_SHARE

    def _drop(self, key: bytes) -> None:
        dropped = self._kept.pop(key, None)
        if dropped is not None:
            self.size_bytes -= _size(dropped.body)


class Recording:
    """Collects an answer piece by piece while it is passed on; gives up if it becomes too large."""

    __slots__ = ("_keep", "_left_bytes", "_pieces")

    def __init__(self, keep: Callable[[bytes], None], max_bytes: int) -> None:
        """Sets what stores the answer, and its largest size."""
        self._keep = keep
        self._left_bytes = max_bytes
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        """Appends a piece."""
        self._left_bytes -= len(piece)
        if self._left_bytes < 0:
            self._pieces = []
        else:
            self._pieces.append(piece)

    def end(self, collected: Collected) -> None:
        """Stores the answer if it is complete."""
        if self._left_bytes >= 0 and collected.complete and not collected.malformed and not collected.error:
            self._keep(b"".join(self._pieces))


def _size(body: bytes) -> int:
    return len(body) + _OVERHEAD_BYTES
