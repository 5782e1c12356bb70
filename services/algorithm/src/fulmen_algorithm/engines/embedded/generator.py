"""The model and the only thread that uses it.

The requests that wait when a batch ends form the next one. `generate` runs all rows of a batch together; a row that
ends early is answered immediately, while the batch continues.

Weights are swapped at token boundaries, also within an answer. Invariant: a token's version is that of the weights
whose forward pass computed its logits. (Keys and values cached before a swap are kept.)

The library's continuous batching is slower here (64 requests of 4 tokens on a CPU thread: 38 ms instead of 27 ms) and
has neither seeds nor stop strings per request.
"""

import asyncio
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Self

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from fulmen_algorithm.engines.embedded.adapters import use_adapter
from fulmen_algorithm.engines.embedded.protocol import EngineError, Overloaded, Sampling
from fulmen_algorithm.engines.embedded.routing import RoutingTape
from fulmen_algorithm.engines.embedded.sampling import PerRequestSampler, SampledToken, TokenTap
from fulmen_algorithm.engines.embedded.scoring import scores_of
from fulmen_algorithm.engines.embedded.weights import Prepared, Served, replace_tensors

TokenSink = Callable[[SampledToken], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorLimits:
    """Bounds of the queue and of a batch.

    Attributes:
        max_batch_size: Maximum number of requests per batch.
        max_batch_tokens: Maximum number of positions per batch: requests times the longest prompt plus completion.
        max_waiting: Maximum number of waiting requests; more are refused.
        queue_deadline_s: Maximum wait of a request, in seconds; then it is refused.
    """

    max_batch_size: int = 128
    max_batch_tokens: int = 131_072
    max_waiting: int = 1024
    queue_deadline_s: float = 60.0


@dataclass(slots=True, kw_only=True)
class Job:
    """One request in the model thread.

    Attributes:
        prompt_ids: Prompt.
        sampling: Sampling parameters.
        on_token: Called in the model thread with each token; true ends the row.
        enqueued_at: Time of arrival, by `time.monotonic`.
        cancelled: Set by the event loop when the caller has disconnected; read at token boundaries.
        started: Set when the job enters a batch.
        done: Resolved when the last token was delivered.
        adapter: Name of the adapter; empty for the model without adapters.
    """

    prompt_ids: Sequence[int]
    sampling: Sampling
    on_token: TokenSink
    enqueued_at: float
    done: asyncio.Future[None]
    cancelled: bool = False
    started: bool = False
    adapter: str = ""

    @property
    def size(self) -> int:
        """Maximum number of positions of the job."""
        return len(self.prompt_ids) + self.sampling.max_tokens


@dataclass(slots=True, kw_only=True)
class GeneratorStats:
    """Counters since the start."""

    requests: int = 0
    refused: int = 0
    batches: int = 0
    forward_passes: int = 0
    tokens: int = 0
    largest_batch: int = 0
    swaps: int = 0
    swaps_in_mid_batch: int = 0


@dataclass(slots=True, kw_only=True)
class _Swap:
    weights: Prepared
    version: int
    done: asyncio.Future[float]


@dataclass(slots=True, kw_only=True)
class Generator:
    """Owns the model; an async context manager, created on the event loop that uses it.

    `model` is a causal language model of transformers, which may have adapters (`adapters.add_adapters`). With a `tape` of it
    the experts of all tokens are recorded.
    """

    model: PreTrainedModel
    pad_token_id: int
    eos_token_ids: frozenset[int]
    version: int = 0
    served: Served = field(default_factory=Served)
    seed: int = 0
    tape: RoutingTape | None = None
    limits: GeneratorLimits = field(default_factory=GeneratorLimits)
    stats: GeneratorStats = field(default_factory=GeneratorStats)
    _waiting: list[Job] = field(default_factory=list)
    _swaps: "queue.SimpleQueue[_Swap]" = field(default_factory=queue.SimpleQueue)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")
    )
    _shared: torch.Generator = field(init=False)
    _batcher: asyncio.Task[None] | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)

    async def __aenter__(self) -> Self:
        """Starts the batcher."""
        self._shared = torch.Generator(self.model.device).manual_seed(self.seed)
        # The checkpoint's own generation settings (penalties, top_k) would silently change the distribution.
        self.model.generation_config = GenerationConfig(
            do_sample=False, pad_token_id=self.pad_token_id, eos_token_id=sorted(self.eos_token_ids) or None
        )
        self._batcher = asyncio.create_task(self._batch_forever(), name="batcher")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Refuses waiting requests, ends the running batch at the next token, and stops the thread."""
        self.batcher.cancel()
        # The exception of the batcher has been raised by its watcher.
        await asyncio.gather(self.batcher, return_exceptions=True)
        for job in self._waiting:
            _refuse(job, Overloaded("The engine is shutting down."))
        self._thread.shutdown(wait=True)

    @property
    def batcher(self) -> "asyncio.Task[None]":
        """The task that forms batches; ends by itself only if it fails."""
        if self._batcher is None:
            raise RuntimeError("The generator was not entered.")
        return self._batcher

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return len(self._waiting)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, on_token: TokenSink, *, adapter: str = ""
    ) -> None:
        """Runs one request to its end.

        Args:
            prompt_ids: At least one token.
            sampling: Sampling parameters.
            on_token: Called in the model thread with each sampled token; true ends the completion.
            adapter: Name of the adapter; empty for the model without adapters.

        Raises:
            Overloaded: if the queue is full, or the request waited for longer than the deadline.
        """
        if len(self._waiting) >= self.limits.max_waiting:
            self.stats.refused += 1
            raise Overloaded("The engine's queue is full.")
        job = Job(
            prompt_ids=prompt_ids,
            sampling=sampling,
            on_token=on_token,
            enqueued_at=perf_counter(),
            done=self._loop.create_future(),
            adapter=adapter,
        )
        self._waiting.append(job)
        self._wake.set()
        deadline = self._loop.call_later(self.limits.queue_deadline_s, self._expire, job)
        try:
            # Bounded: the deadline refuses a job that waits, and a batch ends after max_tokens forward passes.
            await job.done
        finally:
            deadline.cancel()
            job.cancelled = True

    async def score(self, token_ids: Sequence[int], *, adapter: str = "") -> list[float]:
        """Computes the log-probability of each token but the first, between two batches; see `scoring.scores_of`.

        Raises:
            Overloaded: if the engine is shutting down.
            EngineError: if the model cannot take the tokens.
        """
        try:
            return await self._loop.run_in_executor(self._thread, self._score, token_ids, adapter)
        except (RuntimeError, ValueError, MemoryError) as error:
            raise EngineError(f"Scoring failed: {error}") from error

    def _score(self, token_ids: Sequence[int], adapter: str) -> list[float]:
        self._apply_swaps(False)
        use_adapter(self.model, adapter)
        return scores_of(self.model, token_ids)

    async def swap(self, weights: Prepared, version: int) -> float:
        """Swaps verified weights into the model at the next token boundary.

        Returns:
            Seconds during which no token could be generated.
        """
        swap = _Swap(weights=weights, version=version, done=self._loop.create_future())
        self._swaps.put(swap)
        self._wake.set()
        # Bounded: the next token boundary is one forward pass away.
        return await swap.done

    async def _batch_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._loop.run_in_executor(self._thread, self._apply_swaps, False)
            while batch := self._next_batch():
                self.stats.requests += len(batch)
                self.stats.batches += 1
                self.stats.largest_batch = max(self.stats.largest_batch, len(batch))
                try:
                    await self._loop.run_in_executor(self._thread, self._run, batch)
                except asyncio.CancelledError:
                    for job in batch:
                        job.cancelled = True
                        _refuse(job, Overloaded("The engine is shutting down."))
                    raise
                except (RuntimeError, ValueError, MemoryError) as error:
                    # One bad batch (out of memory, a tokenizer id beyond the model) must not end the engine.
                    for job in batch:
                        _refuse(job, EngineError(f"Generation failed: {error}"))

    def _next_batch(self) -> list[Job]:
        """Dequeues jobs in order of arrival, up to the batch size; all have the adapter of the first."""
        batch: list[Job] = []
        longest = 0
        self._waiting = [job for job in self._waiting if not job.cancelled]
        for job in self._waiting:
            if job.adapter != self._waiting[0].adapter:
                continue
            longest = max(longest, job.size)
            if batch and (len(batch) + 1) * longest > self.limits.max_batch_tokens:
                break
            if len(batch) == self.limits.max_batch_size:
                break
            job.started = True
            batch.append(job)
        self._waiting = [job for job in self._waiting if not job.started]
        return batch

    def _expire(self, job: Job) -> None:
        if not job.started and job in self._waiting:
            self._waiting.remove(job)
            self.stats.refused += 1
            _refuse(job, Overloaded(f"The request waited for {self.limits.queue_deadline_s:g} s."))

    # The methods below run in the model thread.

    def _apply_swaps(self, in_mid_batch: bool) -> None:
        while not self._swaps.empty():
            swap = self._swaps.get()
            started = perf_counter()
            replace_tensors(self.model.state_dict(keep_vars=True), swap.weights.tensors)
            self.served = swap.weights.served or self.served
            self.version = swap.version
            self.stats.swaps += 1
            self.stats.swaps_in_mid_batch += in_mid_batch
            self._to_loop(_resolve, swap.done, perf_counter() - started)

    def _run(self, batch: list[Job]) -> None:
        self._apply_swaps(False)
        use_adapter(self.model, batch[0].adapter)
        finished = [False] * len(batch)

        def on_tokens(tokens: list[SampledToken]) -> list[bool]:
            self.stats.forward_passes += 1
            ended: list[asyncio.Future[None]] = []
            if self.tape is not None:
                routes = self.tape.take()
                tokens = [replace(token, experts=routes[token.row]) for token in tokens]
            for token in tokens:
                job = batch[token.row]
                if finished[token.row]:
                    continue
                self.stats.tokens += 1
                if job.on_token(token) or job.cancelled:
                    finished[token.row] = True
                    ended.append(job.done)
            if ended:
                # Together: each call wakes the event loop, which takes the interpreter from this thread.
                self._to_loop(_resolve_all, ended)
            if not all(finished):
                self._apply_swaps(True)
            return finished

        width = max(len(job.prompt_ids) for job in batch)
        pads = [width - len(job.prompt_ids) for job in batch]
        rows = [[self.pad_token_id] * pad + list(job.prompt_ids) for pad, job in zip(pads, batch, strict=True)]
        sampler = PerRequestSampler(
            [job.sampling for job in batch],
            shared=self._shared,
            version=lambda: self.version,
            device=self.model.device,
        )
        if self.tape is not None:
            self.tape.begin(pads)
        with torch.inference_mode():
            self.model.generate(  # type: ignore[operator]  # the library types it as a module attribute
                input_ids=torch.tensor(rows, device=self.model.device),
                attention_mask=torch.tensor([[0] * p + [1] * (width - p) for p in pads], device=self.model.device),
                max_new_tokens=max(job.sampling.max_tokens for job in batch),
                logits_processor=LogitsProcessorList([sampler]),
                stopping_criteria=StoppingCriteriaList([TokenTap(sampler, on_tokens)]),
            )
        # An end-of-sequence id that only the library knows would end `generate` with a row still open.
        for job, ended in zip(batch, finished, strict=True):
            if not ended:
                self._to_loop(_refuse, job, EngineError("Generation ended before the request was complete."))

    def _to_loop(self, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)


def _resolve(future: asyncio.Future, value: object) -> None:
    if not future.done():
        future.set_result(value)


def _resolve_all(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        _resolve(future, None)


def _refuse(job: Job, error: EngineError) -> None:
    if not job.done.done():
        job.done.set_exception(error)
