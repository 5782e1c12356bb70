"""Answers calls of cached routes from memory, and stores the answers of backends."""

from __future__ import annotations

from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.backends.client import BackendAnswer, Dispatch
from fulmen_llm_proxy.calls.answer_cache import AnswerCache, Recording, cache_key
from fulmen_llm_proxy.metrics.routing import RoutingMetrics
from fulmen_llm_proxy.routing.table import Route

_HEADER = b"x-fulmen-cache"
_HIT, _MISS = (_HEADER, b"hit"), (_HEADER, b"miss")
_TRAIN = "train"


class AnswerMemory:
    """The answer cache as the pipeline uses it."""

    def __init__(self, cache: AnswerCache, metrics: RoutingMetrics) -> None:
        self._cache = cache
        self._metrics = metrics

    def serves(self, route: Route | None, caller: Caller) -> bool:
        """Returns whether the caller's calls on a route may be answered from memory; training calls never are."""
        if route is None or not route.cached:
            return False
        return caller.attribution is None or caller.attribution.mode != _TRAIN

    def find(self, dispatch: Dispatch, caller: Caller) -> BackendAnswer | None:
        """Returns the cached answer to this request, or None."""
        key = _key(dispatch, caller)
        found = None if key is None else self._cache.find(key)
        self._metrics.looked_up("miss" if found is None else "hit")
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
        """Returns a recording to collect the answer's bytes in; None if it is not to be cached."""
        answer.headers = (*answer.headers, _MISS)
        if answer.status != 200 or not answer.dispatch.choice.route.cached:
            return None
        key = _key(answer.dispatch, caller)
        return None if key is None else self._cache.recording(key, answer.content_type)


def _key(dispatch: Dispatch, caller: Caller) -> bytes | None:
    return cache_key(caller.project, dispatch.choice, dispatch.plan, dispatch.headers)
