"""Chooses the replica of a variant for a call.

With sticky balancing an attempt stays where it is seated (`seats.py`): a new one where the fewest are, by weight.

Calls without an attempt, and prompts that are kept together by their beginning, are placed by rendezvous hashing with
bounded loads: every replica gets a score from the call's key, and the best score wins among the replicas that have less
than 1.25 times their share of the calls in flight. A key stays where its prefix is cached, a replica that joins or
leaves moves only its own keys, and no replica is much busier than the others.

Sources: V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent Hashing with Bounded Loads" (SODA 2018); C. Schindelhauer,
G. Schomaker, "Weighted distributed hash tables" (SPAA 2005).
"""

from __future__ import annotations

import hashlib
import math
import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any, Protocol, TypeVar

import msgspec

from fulmen_llm_proxy.apis.api import UNREADABLE
from fulmen_llm_proxy.apis.collected import Fields
from fulmen_llm_proxy.routing.backend_state import BackendState, BackendStates
from fulmen_llm_proxy.routing.breaker import BreakerState
from fulmen_llm_proxy.routing.seats import Seat

LOAD_FACTOR = 1.25

_MASK = (1 << 64) - 1
_HASH_SPACE = float(1 << 64)
_MIX_FIRST = 0x9E3779B97F4A7C15
_MIX_SECOND = 0xD6E8FEB86659FD93


_SYSTEM_FIELDS = ("system", "instructions")
_PROMPT_FIELDS = ("messages", "input", "prompt")
_USER_FIELD = "user"
_MESSAGE_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_ROLE = re.compile(rb'"role"')
_MESSAGES = 2
"""Messages that count as the beginning of a conversation, which the rollouts of a group share."""

_TEXT_BYTES = 512
"""Length of the beginning of a prompt without messages."""

_MAX_BYTES = 2048


class Balancing(StrEnum):
    """Load-balancing policy; see `fulmen.llm_proxy.v1.Balancing`."""

    STICKY = "sticky"
    PREFIX_CACHE = "prefix_cache"
    LEAST_OUTSTANDING = "least_outstanding"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One backend of a variant.

    Attributes:
        index: position in the variant.
        weight: share of the calls, relative to the other replicas.
        seed: `seed_of` its id.
        hold_until_s: end of its hold, seconds since 1970.
    """

    index: int
    backend_id: str
    weight: int
    seed: int
    max_in_flight: int
    hold_until_s: float = 0.0


class Weighted(Protocol):
    """A candidate of rendezvous hashing."""

    @property
    def weight(self) -> int: ...

    @property
    def seed(self) -> int: ...


W = TypeVar("W", bound=Weighted)


def seed_of(name: str) -> int:
    """Returns a 64-bit hash of a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def key_of(data: bytes) -> int:
    """Returns a 64-bit hash of a call's key."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class CallAffinity:
    """The keys by which a call is bound to the place where its prompt is cached; computed on first use."""

    __slots__ = ("_attempt", "_attempt_key", "_conversation_key", "_fields", "_prefix_key")

    def __init__(self, attempt: str | None, fields: Fields) -> None:
        """Sets the name of the attempt or conversation, None without either, and the fields of the request."""
        self._conversation_key: int | None = None
        self._attempt = attempt
        self._fields = fields
        self._attempt_key: int | None = None
        self._prefix_key: int | None = None

    def of(self, fields: Fields) -> CallAffinity:
        """Returns the keys of the same caller's call with other fields."""
        return CallAffinity(self._attempt, fields)

    @property
    def is_named(self) -> bool:
        """Whether the call belongs to an attempt or conversation."""
        return self._attempt is not None

    @property
    def attempt(self) -> int:
        """64 bits, equal for all calls of an attempt; random without an attempt."""
        if self._attempt_key is None:
            self._attempt_key = random.getrandbits(64) if self._attempt is None else key_of(self._attempt.encode())
        return self._attempt_key

    @property
    def conversation(self) -> int:
        """64 bits, equal for all calls of an attempt, or of a continued conversation; random without messages."""
        if self._attempt is not None:
            return self.attempt
        if self._conversation_key is None:
            said = conversation_beginning(self._fields)
            self._conversation_key = key_of("\0".join(said).encode("utf-8", "replace")) if said else self.attempt
        return self._conversation_key

    @property
    def prefix(self) -> int:
        """64 bits, equal for all calls whose prompts share their beginning."""
        if self._prefix_key is None:
            self._prefix_key = key_of(prompt_beginning(self._fields))
        return self._prefix_key


def conversation_beginning(fields: Fields) -> list[str]:
    """Returns the texts of a conversation up to the first message of its user, and who that is; empty without messages.

    Texts alone: clients may send a message again in another form, such as with a mark of what to cache.
    """
    try:
        messages = [_MESSAGE_LIST.decode(fields[name]) for name in _PROMPT_FIELDS if name in fields]
        said = [_text(msgspec.json.decode(fields[name])) for name in (_USER_FIELD, *_SYSTEM_FIELDS) if name in fields]
        for raw in messages[0]:
            message = msgspec.json.decode(raw)
            if not isinstance(message, dict) or "role" not in message:
                return []
            said.append(_text(message.get("content")))
            if message["role"] == "user":
                break
    except (*UNREADABLE, IndexError):
        return []
    return said if messages[0] else []


def _text(content: Any) -> str:
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    return "\n".join(text for text in texts if isinstance(text, str))


def prompt_beginning(fields: Fields) -> bytes:
    """Returns the beginning of a prompt: its system text and first messages, as raw JSON.

    It stays the same while a conversation continues. Nothing is decoded: a message ends where the `"role"` of the next
    one starts, which no string within a message can contain unescaped.
    """
    parts = [bytes(fields[name]) for name in _SYSTEM_FIELDS if name in fields]
    parts += [_first_messages(fields[name]) for name in _PROMPT_FIELDS if name in fields]
    beginning = b"\0".join(parts)
    if len(beginning) > _MAX_BYTES:
        half = _MAX_BYTES // 2
        return b"%d\0%b%b" % (len(beginning), beginning[:half], beginning[-half:])
    return beginning


def _first_messages(prompt: msgspec.Raw) -> bytes:
    roles = [found.start() for found in islice(_ROLE.finditer(prompt), _MESSAGES + 1)]
    if not roles:
        return bytes(memoryview(prompt)[:_TEXT_BYTES])
    # Ends with the last complete message, without the end of the list.
    beginning = bytes(memoryview(prompt)[: roles[-1]] if len(roles) > _MESSAGES else prompt)
    return beginning[: beginning.rfind(b"}") + 1]


def draw(seed: int, key: int) -> int:
    """Returns 64 uniformly distributed bits for a pair: a shortened splitmix64 finaliser, best in its high bits."""
    mixed = (seed ^ key) * _MIX_FIRST & _MASK
    return (mixed ^ mixed >> 32) * _MIX_SECOND & _MASK


def rendezvous(choices: Sequence[W], key: int) -> W:
    """Returns the choice with the best score (weighted rendezvous hashing)."""
    best = choices[0]
    if len(choices) == 1:
        return best
    weight, highest = best.weight, -1
    for choice in choices:
        if choice.weight != weight:
            return max(choices, key=lambda one: _score(one.weight, draw(one.seed, key)))
        drawn = draw(choice.seed, key)
        if drawn > highest:
            best, highest = choice, drawn
    return best


def _score(weight: int, drawn: int) -> float:
    # Adding one half keeps the draw above 0; it may round up to 1.
    share = (drawn + 0.5) / _HASH_SPACE
    return weight / -math.log(share) if share < 1.0 else math.inf


_Candidate = tuple[Replica, BackendState]


def pick(
    replicas: Sequence[Replica],
    *,
    states: BackendStates,
    affinity: CallAffinity,
    balancing: Balancing,
    avoid: Collection[str] = (),
    seat: Seat | None = None,
) -> Replica:
    """Chooses a replica.

    Skips, while others are left, the replicas to avoid, those that are held, those whose breaker is open, and those
    whose engine is saturated. If more than half of the breakers are open, breakers are ignored: the local network is
    then a likelier cause than so many failing backends.

    Args:
        seat: where the attempt is seated. It stays there, even if the engine is saturated, unless the replica is skipped, or
            its turn there has not come and another engine has room.
    """
    if len(replicas) == 1:
        return replicas[0]
    candidates = []
    healthy = not avoid
    for replica in replicas:
        state = states.of(replica.backend_id)
        if replica.hold_until_s or state.is_saturated or not state.breaker.admits:
            healthy = False
        candidates.append((replica, state))
    if not healthy:
        candidates = _healthy(candidates, states.wall_clock, avoid)
    if seat is not None:
        roomy = [] if seat.may_call else [one for one in candidates if one[1].row.has_room(seat.tokens)]
        if not roomy:
            for replica, state in candidates:
                if state.row is seat.row:
                    return replica
        candidates = roomy or candidates
    if not healthy:
        candidates = [one for one in candidates if not one[1].is_saturated] or candidates
    if balancing is Balancing.LEAST_OUTSTANDING:
        return _least(candidates, affinity.attempt, lambda state: state.load)
    if balancing is Balancing.STICKY and affinity.is_named and not avoid:
        free = [one for one in candidates if one[1].load < one[0].max_in_flight]
        return _least(free or candidates, affinity.attempt, lambda state: len(state.row.seats))
    key = affinity.prefix if balancing is Balancing.PREFIX_CACHE else affinity.attempt
    return rendezvous(within_bound(candidates), key)


def _healthy(candidates: list[_Candidate], wall_clock: Callable[[], float], avoid: Collection[str]) -> list[_Candidate]:
    everyone = candidates
    if avoid:
        candidates = [one for one in candidates if one[0].backend_id not in avoid] or candidates
    if any(replica.hold_until_s for replica, _ in candidates):
        now_s = wall_clock()
        candidates = [one for one in candidates if one[0].hold_until_s <= now_s] or candidates
    admitted = [one for one in candidates if one[1].breaker.admits]
    if len(admitted) < len(candidates) and not _panic(everyone):
        candidates = admitted or candidates
    return candidates


def _panic(candidates: list[_Candidate]) -> bool:
    opened = sum(state.breaker.state is BreakerState.OPEN for _, state in candidates)
    return 2 * opened > len(candidates)


def within_bound(candidates: Sequence[_Candidate]) -> list[Replica]:
    """Returns the replicas that may take one more call; never empty.

    A replica's bound is 1.25 times its share, by weight, of the calls in flight, this one included. Replicas with a
    free slot take precedence over those where the call would wait.
    """
    total, weights = 1, 0
    for replica, state in candidates:
        total += state.load
        weights += replica.weight
    per_weight = LOAD_FACTOR * total / weights
    free: list[Replica] = []
    full: list[Replica] = []
    for replica, state in candidates:
        load = state.load
        if load < math.ceil(per_weight * replica.weight):
            (free if load < replica.max_in_flight else full).append(replica)
    return free or full


def _least(candidates: Sequence[_Candidate], key: int, load: Callable[[BackendState], int]) -> Replica:
    loads = [(load(state) + 1) / replica.weight for replica, state in candidates]
    lowest = min(loads)
    return rendezvous([one[0] for one, load in zip(candidates, loads, strict=True) if load == lowest], key)
