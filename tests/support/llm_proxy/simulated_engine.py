"""An inference engine with the timings of a real one and no model: its prefix cache, its scheduler and its clock.

Works as vLLM does (`vllm/v1/core`): the key-value cache consists of blocks of 16 tokens, a block is known by its tokens
and all before them, blocks that no request uses stay until the space is needed, least recently used first. In each step
every running request decodes one token, and what is left of the step's token budget goes to prompts in the order of
arrival. A request enters when the cache has room for its prompt and its longest answer; vLLM would let it enter for
its prompt, and preempt a request later.

A token is four bytes of the prompt's text. The answer's text is made up, and has `max_tokens` tokens.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 4
_BLOCK_BYTES = BLOCK_TOKENS * BYTES_PER_TOKEN


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What a step costs, from the data sheet of the GPU and the shape of the model.

    The defaults are Llama 3.1 8B in bfloat16 (8.03e9 parameters; 32 layers of 8 key-value heads of 128 values: 128 KiB a
    token) on an H100 SXM (989 TFLOP/s dense in bfloat16, 3.35 TB/s, 80 GB) of its own: 90 % of the memory, less 16 GB of
    weights and 3 GB of activations, is cache.

    Attributes:
        prefill_tokens_per_s: prompt tokens computed per second: 50 % of the FLOPs, 2 per parameter and token.
        weights_s: reading all weights once, at 80 % of the bandwidth, seconds.
        cached_token_s: reading the keys and values of one token, seconds.
        step_s: scheduling and sampling, seconds a step.
        step_tokens: most tokens of a step (`max_num_batched_tokens`).
        sequences: most requests that run together (`max_num_seqs`).
        blocks: blocks of the cache.
    """

    prefill_tokens_per_s: float = 0.5 * 989e12 / (2 * 8.03e9)
    weights_s: float = 2 * 8.03e9 / (0.8 * 3.35e12)
    cached_token_s: float = 131_072 / (0.8 * 3.35e12)
    step_s: float = 0.002
    step_tokens: int = 8192
    sequences: int = 256
    blocks: int = 25_000

    def step_time_s(self, prompt_tokens: int, contexts: int) -> float:
        """Returns the duration of a step that computes so many prompt tokens and reads so many cached ones, seconds."""
        return self.step_s + max(
            prompt_tokens / self.prefill_tokens_per_s, self.weights_s + contexts * self.cached_token_s
        )


def block_ids(text: bytes) -> list[int]:
    """Returns the ids of a text's complete blocks: each stands for its tokens and all before them."""
    ids, parent = [], 0
    for start in range(0, len(text) - _BLOCK_BYTES + 1, _BLOCK_BYTES):
        parent = hash((parent, text[start : start + _BLOCK_BYTES]))
        ids.append(parent)
    return ids


class PrefixCache:
    """Blocks by id, with the number of requests that use each; those that none uses are evicted when space is needed."""

    def __init__(self, blocks: int) -> None:
        """Creates an empty cache of so many blocks."""
        self.size = blocks
        self.reserved = 0
        self._used: dict[int, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()

    @property
    def used_blocks(self) -> int:
        """Blocks that a request uses or has reserved."""
        return len(self._used) + self.reserved

    def hit_blocks(self, ids: list[int]) -> int:
        """Returns how many of the first blocks are cached."""
        cached = itertools.takewhile(lambda one: one in self._used or one in self._unused, ids)
        return sum(1 for _ in cached)

    def take(self, ids: list[int]) -> None:
        """Uses blocks, and adds those that are not cached."""
        for one in ids:
            self._unused.pop(one, None)
            self._used[one] = self._used.get(one, 0) + 1
        self._evict()

    def reserve(self, blocks: int) -> None:
        """Reserves space for blocks that are still to be filled; a negative number returns it."""
        self.reserved += blocks
        self._evict()

    def release(self, ids: list[int]) -> None:
        """Stops using blocks; the end of a text is evicted before its beginning."""
        for one in reversed(ids):
            self._used[one] -= 1
            if not self._used[one]:
                del self._used[one]
                self._unused[one] = None

    def clear(self) -> None:
        """Forgets all blocks; none may be in use."""
        self._unused.clear()

    def _evict(self) -> None:
        while self._unused and self.used_blocks + len(self._unused) > self.size:
            self._unused.popitem(last=False)


@dataclass(slots=True, eq=False, kw_only=True)
class Generation:
    """One request.

    Attributes:
        prompt: its text.
        tokens: length of its answer.
        on_token: called after each step that adds a token, with the number of tokens so far.
    """

    prompt: bytes
    tokens: int
    on_token: Callable[[int], None]
    ids: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    reserved: int = 0
    cached: int = 0
    to_compute: int = 0
    made: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt, tokens."""
        return -(-len(self.prompt) // BYTES_PER_TOKEN)

    @property
    def answer(self) -> bytes:
        """The text of the whole answer; another prompt has another answer."""
        word = b"%07x " % (hash(self.prompt) & 0xFFFFFFF)
        return (word * self.tokens)[: self.tokens * BYTES_PER_TOKEN]


class SimulatedEngine:
    """The engine; `run` is its loop."""

    def __init__(self, timings: Timings) -> None:
        self.timings = timings
        self.cache = PrefixCache(timings.blocks)
        self.waiting: deque[Generation] = deque()
        self.running: list[Generation] = []
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.finished = 0
        self._decoding: list[Generation] = []
        self._work = asyncio.Event()
        self.open = asyncio.Event()
        """While it is not set, no step begins."""
        self.open.set()

    def submit(self, sequence: Generation) -> None:
        """Queues a request.

        Raises:
            ValueError: if it is longer than the cache.
        """
        if self._needed(sequence) > self.timings.blocks:
            raise ValueError("The request is longer than the cache.")
        sequence.ids = block_ids(sequence.prompt)
        self.waiting.append(sequence)
        self._work.set()

    def tokens_to_compute(self) -> int:
        """Returns the prompt tokens of all requests that are neither cached nor computed yet."""
        waiting = (one.prompt_tokens - self.cache.hit_blocks(one.ids) * BLOCK_TOKENS for one in self.waiting)
        return sum(waiting) + sum(one.to_compute for one in self.running)

    def abort(self, sequence: Generation) -> None:
        """Drops a request whose caller has gone."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.running:
            self._end(sequence)

    def forget(self) -> None:
        """Empties the cache, as new weights do: requests that run compute their prompts and answers so far again."""
        for one in self.running:
            self.cache.release(one.held)
            self.cache.reserve(len(one.held))
            one.reserved += len(one.held)
            one.held, one.to_compute = [], one.prompt_tokens + one.made
        self.cache.clear()

    async def run(self) -> None:
        """Steps until it is cancelled; a step that was late shortens the pauses after it."""
        loop = asyncio.get_running_loop()
        ready_s = loop.time()
        while True:
            if not self.waiting and not self.running:
                self._work.clear()
                await self._work.wait()
                ready_s = loop.time()
            await self.open.wait()
            ready_s += self._begin_step()
            await asyncio.sleep(max(0.0, ready_s - loop.time()))
            self._end_step()

    def _needed(self, sequence: Generation) -> int:
        return -(-(sequence.prompt_tokens + sequence.tokens) // BLOCK_TOKENS)

    def _enter(self) -> bool:
        """Lets the first waiting request in if there is room."""
        sequence = self.waiting[0]
        hits = self.cache.hit_blocks(sequence.ids)
        cached = min(hits * BLOCK_TOKENS, sequence.prompt_tokens - 1)  # the last token gives the first of the answer
        known = sequence.ids[:hits]
        self.cache.take(known)
        missing = self._needed(sequence) - hits
        if self.cache.used_blocks + missing > self.timings.blocks:
            self.cache.release(known)
            return False
        self.waiting.popleft()
        self.cache.reserve(missing)
        sequence.held, sequence.reserved = known, missing
        sequence.cached, sequence.to_compute = cached, sequence.prompt_tokens - cached
        self.queried_tokens += sequence.prompt_tokens
        self.hit_tokens += cached
        self.running.append(sequence)
        return True

    def _begin_step(self) -> float:
        """Plans a step; returns its duration, seconds."""
        decoding = [one for one in self.running if not one.to_compute]
        budget = self.timings.step_tokens - len(decoding)
        contexts = sum(one.prompt_tokens + one.made for one in decoding)
        computed = 0
        for one in self.running:
            if one.to_compute and computed < budget:
                computed += self._compute(one, budget - computed)
        while self.waiting and computed < budget and len(self.running) < self.timings.sequences and self._enter():
            computed += self._compute(self.running[-1], budget - computed)
        self._decoding = decoding
        return self.timings.step_time_s(computed, contexts)

    def _compute(self, sequence: Generation, tokens: int) -> int:
        done = min(sequence.to_compute, tokens)
        sequence.to_compute -= done
        if not sequence.to_compute:
            self._fill(sequence, sequence.ids)
        return done

    def _fill(self, sequence: Generation, ids: list[int]) -> None:
        """Puts the blocks of a request that are computed now into the cache."""
        new = ids[len(sequence.held) :]
        self.cache.reserve(-min(len(new), sequence.reserved))
        sequence.reserved -= min(len(new), sequence.reserved)
        self.cache.take(new)
        sequence.held = sequence.held + new

    def _end_step(self) -> None:
        for one in list(self.running):
            if one.to_compute:
                continue
            one.made += 1
            if one.made >= one.tokens:
                self._fill(one, block_ids(one.prompt + one.answer))
                self._end(one)
                self.finished += 1
            one.on_token(one.made)

    def _end(self, sequence: Generation) -> None:
        self.running.remove(sequence)
        self.cache.reserve(-sequence.reserved)
        self.cache.release(sequence.held)
        sequence.reserved, sequence.held = 0, []
