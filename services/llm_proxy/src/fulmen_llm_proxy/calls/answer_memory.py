"""Answers calls of cached routes from memory, or from the cache that proxies share, and stores the answers of backends."""

from __future__ import annotations

import time
from functools import partial

from fulmen_llm_proxy.attempts.caller import Caller
from fulmen_llm_proxy.backends.client import BackendAnswer, Dispatch
from fulmen_llm_proxy.calls.answer_cache import AnswerCache, CachedAnswer, Recording, cache_key
from fulmen_llm_proxy.calls.shared_answers import MAX_ANSWER_BYTES, SharedAnswer, SharedAnswers
from fulmen_llm_proxy.metrics.routing import RoutingMetrics
from fulmen_llm_proxy.routing.table import Route

_HEADER = b"x-fulmen-cache"
_HIT, _MISS = (_HEADER, b"hit"), (_HEADER, b"miss")
_TRAIN = "train"


class AnswerMemory:
    """The answer cache as the pipeline uses it."""

    def __init__(self, cache: AnswerCache, metrics: RoutingMetrics, *, shared: SharedAnswers | None = None) -> None:
        """Sets the process's own cache, and the one that proxies share; None without one."""
        self._cache = cache
        self._shared = shared
        self._metrics = metrics

    def serves(self, route: Route | None, caller: Caller) -> bool:
        """Returns whether the caller's calls on a route may be answered from memory; training calls never are."""
        if route is None or not route.cached:
            return False
        return caller.attribution is None or caller.attribution.mode != _TRAIN

    async def find(self, dispatch: Dispatch, caller: Caller) -> BackendAnswer | None:
        """Returns the cached answer to this request, or None."""
        key = _key(dispatch, caller)
        found = None if key is None else self._cache.find(key) or await self._fetch(key)
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
        if key is None:
            return None
        largest_shared = 0 if self._shared is None else MAX_ANSWER_BYTES
        return Recording(
            partial(self._keep, key, answer.content_type), max(self._cache.max_answer_bytes, largest_shared)
        )

    async def _fetch(self, key: bytes) -> CachedAnswer | SharedAnswer | None:
        """Returns the answer of another process, and keeps it here for the rest of its lifetime."""
        found = None if self._shared is None else await self._shared.find(key)
        if found is not None:
            self._cache.keep(key, found.content_type, found.body, ttl_s=found.expires_s - time.time())
        return found

    def _keep(self, key: bytes, content_type: bytes, body: bytes) -> None:
        self._cache.keep(key, content_type, body)
        if self._shared is not None:
            self._shared.put(key, content_type, body)


def _key(dispatch: Dispatch, caller: Caller) -> bytes | None:
    return cache_key(caller.project, dispatch.choice, dispatch.plan, dispatch.headers)
