"""Every rpc of every service, unary or streaming, called with messages and with bytes that are none."""

from __future__ import annotations

import random
from collections.abc import Sequence

from fulmen.errors import FulmenError, InternalError
from tests.fuzz.mutation import decoded, framed, mutate_bytes, mutate_message, unframed
from tests.fuzz.target import Leak, check_text, text_of
from tests.fuzz.world import ROLES, SECRET, SERVICES, LiveTarget, LiveWorld
from tests.support.store.rpcs import exchange

PATIENCE_S = 0.1
"""Long enough for any answer that is not waited for; a watch that was opened is left then."""
_ENDS_THE_SERVICE = frozenset({"/fulmen.runner.v1.RunnerService/Drain"})


def seeds(world: LiveWorld) -> list[bytes]:
    """Returns an empty call of every rpc, and some with fields."""
    rng = random.Random(1)
    found = []
    for path, (_, rpc) in sorted(world.rpcs.items()):
        if path in _ENDS_THE_SERVICE:
            continue
        found.append(framed(f"{path} admin", b""))
        for _ in range(5):
            message = rpc.request_class()
            for _ in range(4):
                mutate_message(message, rng, world.names)
            found.append(framed(f"{path} admin", message.SerializeToString()))
    return found


def mutate(world: LiveWorld, data: bytes, rng: random.Random) -> bytes:
    """Changes a message, its bytes, the number of messages, or the role of the caller."""
    head, parts = unframed(data)
    path, _, role = head.partition(" ")
    if path not in world.rpcs:
        return data
    rpc = world.rpcs[path][1]
    parts = parts or [b""]
    place = rng.randrange(len(parts))
    if rng.random() < 0.1:
        role = rng.choice(ROLES)
    if rpc.method.client_streaming and len(parts) < 4 and rng.random() < 0.2:
        parts.insert(place, parts[place])
    if rng.random() < 0.2:
        parts[place] = mutate_bytes(parts[place], rng)
    else:
        message = decoded(rpc.request_class, parts[place])
        mutate_message(message, rng, world.names)
        parts[place] = message.SerializeToString()
    return framed(f"{path} {role}", *parts)


async def send(world: LiveWorld, data: bytes) -> None:
    """Makes the call; an answer of another project or an unexpected error is a finding."""
    head, parts = unframed(data)
    path, _, role = head.partition(" ")
    if path not in world.rpcs or path in _ENDS_THE_SERVICE:
        return
    channel, rpc = world.rpcs[path]
    metadata = [("authorization", f"Bearer {world.tokens.get(role, world.tokens['admin'])}")]
    parts = parts if rpc.method.client_streaming else parts[:1] or [b""]
    outcome = await exchange(channel, rpc, parts, metadata=metadata, answers=len(parts), timeout_s=PATIENCE_S)
    check(path, outcome)


def check(path: str, outcome: Sequence[object] | FulmenError) -> None:
    """Raises for what must not be answered."""
    if isinstance(outcome, FulmenError):
        if isinstance(outcome, InternalError):
            raise InternalError(f"{path}: {outcome.message}")
        told = text_of(outcome)
        check_text(told)
    else:
        told = "".join(message.SerializeToString().decode("latin-1") for message in outcome)  # type: ignore[attr-defined]
    if SECRET in told:
        raise Leak(f"{path} shows another project")


TARGET = LiveTarget(seeds=seeds, mutate=mutate, send=send, services=SERVICES, workers=24)
