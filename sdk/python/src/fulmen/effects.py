"""`fulmen.effect`: side effects that happen once per rollout, whatever happens to its runners.

A lost attempt continues elsewhere, and repeats what its code does: `docs/fleets.md`. An effect is declared at the LLM proxy
before it is carried out, and its result afterwards; an attempt that reaches it again gets the result.

Imports only the standard library: agents with their own Python environments use it, too.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar, cast, overload

from fulmen.agent import current

__all__ = ["EffectFailed", "EffectUnknown", "effect"]

T = TypeVar("T")

ATTEMPT_VARIABLE: Final = "FULMEN_ATTEMPT"
PATIENCE_S: Final = 60.0
"""Time for which the proxy is asked again while it or the store is away, seconds."""
_PAUSE_S: Final = 0.25
_TIMEOUT_S: Final = 15.0
_AWAY: Final = (429, 500, 502, 503, 504)


class EffectFailed(RuntimeError):
    """The proxy refused the effect, or did not answer: it was not carried out."""


class EffectUnknown(RuntimeError):
    """The effect was begun before, and it is not known whether it was carried out. Check the system that it changes, then
    continue."""


@overload
def effect(name: str, key: str, call: Callable[[], Awaitable[T]]) -> Awaitable[T]: ...


@overload
def effect(name: str, key: str, call: Callable[[], T]) -> T: ...


def effect(name: str, key: str, call: Callable[[], Any]) -> Any:
    """Carries out a side effect at most once per rollout, such as a mail or a payment.

    Outside an attempt it only calls `call`. An exception of `call` is raised unchanged, and the effect's result stays
    unknown.

    Args:
        name: Name of the effect: 1 to 64 characters of [A-Za-z0-9_.-].
        key: Key that distinguishes effects of the same name, such as the number of an invoice; at most 256 characters. It must
            not depend on the attempt.
        call: The function that carries it out; if it is a coroutine function, await the result. Its result must be representable
            as at most 64 KiB of JSON, and is returned in that form.

    Raises:
        EffectUnknown: If it was begun by a lost attempt or another call, and its result is not known.
        EffectFailed: If it could not be declared.
    """
    environment = _environment()
    if inspect.iscoroutinefunction(call):
        return call() if environment is None else _effect_async(environment, name, key, call)
    if environment is None:
        return call()
    token = uuid.uuid4().hex
    begun = _ask(environment, name=name, key=key, token=token)
    if begun["state"] == "begun":
        return _ask(environment, name=name, key=key, token=token, result=call())["result"]
    return _known(begun)


async def _effect_async(
    environment: Mapping[str, str], name: str, key: str, call: Callable[[], Awaitable[object]]
) -> object:
    token = uuid.uuid4().hex
    begun = await asyncio.to_thread(_ask, environment, name=name, key=key, token=token)
    if begun["state"] == "begun":
        result = await call()
        return (await asyncio.to_thread(_ask, environment, name=name, key=key, token=token, result=result))["result"]
    return _known(begun)


def _known(found: Mapping[str, Any]) -> object:
    if found["state"] == "done":
        return found["result"]
    raise EffectUnknown(
        f"The effect {found['name']} {found['key']!r} was begun by {found['attempt']}, and its result is not known."
    )


def _environment() -> Mapping[str, str] | None:
    """Returns the variables of the current attempt; None outside one."""
    context = current()
    if context is not None:
        return context.environment if "OPENAI_BASE_URL" in context.environment else None
    return os.environ if ATTEMPT_VARIABLE in os.environ and "OPENAI_BASE_URL" in os.environ else None


def _ask(environment: Mapping[str, str], **fields: object) -> dict[str, Any]:
    """Sends a request, and retries it while the proxy or the store is unavailable: it is idempotent."""
    request = urllib.request.Request(  # noqa: S310  # the address of the proxy
        environment["OPENAI_BASE_URL"].rstrip("/") + "/effects",
        data=json.dumps(fields).encode(),
        headers={
            "authorization": f"Bearer {environment['OPENAI_API_KEY']}",
            "content-type": "application/json",
        },
    )
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310  # the address of the proxy
                return cast("dict[str, Any]", json.load(answer))
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            if error.code not in _AWAY or time.monotonic() > deadline:
                raise EffectFailed(f"The proxy refused the effect with {error.code}: {text[:500]}") from None
        except (OSError, ValueError) as error:
            if time.monotonic() > deadline:
                raise EffectFailed(f"The proxy did not answer: {error}") from error
        time.sleep(_PAUSE_S)
