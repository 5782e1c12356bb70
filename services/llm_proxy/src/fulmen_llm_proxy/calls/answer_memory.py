"""Answers calls of cached routes from memory, and remembers what backends answered."""

from __future__ import annotations

from collections.abc import Callable

from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.backends.client import BackendAnswer, Dispatch
from fulmen_llm_proxy.calls.answer_cache import AnswerCache, Recording, cache_key
from fulmen_llm_proxy.routing.table import Route

_HEADER = b"x-fulmen-cache"
_HIT, _MISS = (_HEADER, b"hit"), (_HEADER, b"miss")
_TRAIN = "train"


class AnswerMemory:
    """The answer cache as the pipeline sees it."""

    def __init__(self, cache: AnswerCache, looked_up: Callable[[str], None]) -> None:
        """Takes the cache, and what counts lookups: `hit` or `miss`."""
        self._cache = cache
        self._looked_up = looked_up

    def serves(self, route: Route | None, caller: Caller) -> bool:
        """Tells whether calls of a caller on a route may be answered from memory: never those of training."""
        if route is None or not route.cached:
            return False
        return caller.attribution is None or caller.attribution.mode != _TRAIN

    def find(self, dispatch: Dispatch, caller: Caller) -> BackendAnswer | None:
        """Returns the answer that this try got before."""
        key = _key(dispatch, caller)
        found = None if key is None else self._cache.find(key)
        self._looked_up("miss" if found is None else "hit")
        if found is None:
            return None
        return BackendAnswer(
            dispatch=dispatch,
            status=200,
            content_type=found.content_type,
            retry_after="",
            headers=(_HIT,),
            body=found.body,
        )

    def recording(self, answer: BackendAnswer, caller: Caller) -> Recording | None:
        """Returns where the answer's bytes go to be remembered; None for one that is not to be."""
        answer.headers = (*answer.headers, _MISS)
        if answer.status != 200 or not answer.dispatch.choice.route.cached:
            return None
        key = _key(answer.dispatch, caller)
        return None if key is None else self._cache.recording(key, answer.content_type)


def _key(dispatch: Dispatch, caller: Caller) -> bytes | None:
    return cache_key(caller.project, dispatch.choice, dispatch.exchange, dispatch.headers)
