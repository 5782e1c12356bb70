"""Samplers of programs: trainers that only sample, made when needed and removed when others are used instead."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Final

from fulmen.algorithm.v1 import trainer_service_pb2 as pb
from fulmen.errors import ArgumentInvalid, Violation
from fulmen_console.tinker.requests import Sample
from fulmen_console.tinker.trainer_calls import TrainerCalls
from fulmen_console.tinker.wire import Sequence_, encoded_samples

__all__ = ["Sampler", "sample_request"]

AT_ONCE: Final = 4
"""Calls of a sampler that its trainer has at a time; the others wait here."""
DEFAULT_MAX_TOKENS: Final = 512
Open = Callable[[TrainerCalls], Awaitable[str]]


class Sampler:
    """A sampler. Thread: the event loop.

    Attributes:
        id: Its name on the wire, `sampling_session_id`.
        project: Whose it is.
        session_id: Session in which it was made.
        base: Name of its base model.
        path: Path of its weights; empty for a model's temporary weights, and for a base model.
    """

    def __init__(self, sampler_id: str, project: str, session_id: str, *, base: str, path: str, make: Open) -> None:
        """`make` creates its trainer, at the first call and at the first one after `close`."""
        self.id = sampler_id
        self.project = project
        self.session_id = session_id
        self.base = base
        self.path = path
        self.trainer = ""
        self.calls = 0
        self.clients = 0
        self._make = make
        self._opening = asyncio.Lock()
        self._seats = asyncio.Semaphore(AT_ONCE)

    async def sample(self, calls: TrainerCalls, request: Sample) -> bytes:
        """Samples; returns the encoded answer."""
        self.calls += 1
        try:
            async with self._seats:
                trainer = await self._opened(calls)
                answer = await calls.sample(sample_request(trainer, request))
                prompt = await self._prompt_logprobs(calls, trainer, request)
        finally:
            self.calls -= 1
        found = [
            Sequence_(tokens=each.token_ids, logprobs=each.logprobs, stopped=each.stopped)
            for each in answer.completions
        ]
        return encoded_samples(found, prompt)

    async def close(self, calls: TrainerCalls) -> None:
        """Removes its trainer."""
        async with self._opening:
            trainer, self.trainer = self.trainer, ""
            if trainer:
                await calls.delete(trainer)

    async def _opened(self, calls: TrainerCalls) -> str:
        async with self._opening:
            if not self.trainer:
                self.trainer = await self._make(calls)
            return self.trainer

    async def _prompt_logprobs(self, calls: TrainerCalls, trainer: str, request: Sample) -> list[float]:
        """Returns the log-probability of each token of the prompt, nan where none is requested; empty if none is."""
        if not request.prompt_logprobs:
            return []
        tokens = _tokens(request)
        found = [math.nan] * len(tokens)
        if len(tokens) > 1:
            row = pb.TrainingRow(token_ids=tokens)
            call = pb.ForwardBackwardRequest(name=trainer, rows=[row], loss="cross_entropy", forward_only=True)
            answer = await calls.forward_backward(call)
            found[1:] = answer.rows[0].logprobs[1:]
        last = request.prompt_logprobs_last_n or len(tokens)
        return [lp if index >= len(tokens) - last else math.nan for index, lp in enumerate(found)]


def sample_request(trainer: str, request: Sample) -> pb.SampleRequest:
    """Returns the call.

    Raises:
        ArgumentInvalid: if `stop` is an empty list.
    """
    given = request.sampling_params
    if given.stop == [] or given.stop == "":
        text = "must not be empty: a completion always ends at the end of the turn, or at a sequence in `stop`"
        raise ArgumentInvalid(
            "The request is malformed.", violations=[Violation(field="sampling_params.stop", description=text)]
        )
    stops = [given.stop] if isinstance(given.stop, str) else given.stop or []
    call = pb.SampleRequest(
        name=trainer,
        prompt_ids=_tokens(request),
        completion_count=request.num_samples,
        max_tokens=given.max_tokens or DEFAULT_MAX_TOKENS,
        temperature=given.temperature,
        top_p=given.top_p,
        stop_token_ids=[each for each in stops if isinstance(each, int)],
        stop_texts=[each for each in stops if isinstance(each, str)],
    )
    if given.seed is not None:
        call.seed = given.seed
    return call


def _tokens(request: Sample) -> list[int]:
    return [token for chunk in request.prompt.chunks for token in chunk.tokens]
