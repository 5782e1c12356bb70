"""The trace: attempts of agents, made from a seed, in groups that share a task.

Every prompt begins with the same system text and descriptions of tools. Lengths are uniform between their bounds; a
conversation begins with 3,000 tokens and ends after 6 to 18 turns with about 18,000.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.llm_proxy.simulated_engine import BYTES_PER_TOKEN

GROUP = 8
SYSTEM_TOKENS = 2000
TASK_TOKENS = 1000
TURNS = (6, 18)
ANSWER_TOKENS = (50, 150)
TOOL_TOKENS = (300, 2000)
PAUSE_S = (0.2, 2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One call of an agent.

    Attributes:
        answer_tokens: length of the answer.
        result: what the tool says to it.
        pause_s: how long the tool takes.
    """

    answer_tokens: int
    result: str
    pause_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """One attempt."""

    system: str
    task: str
    seed: int

    def turns(self) -> Iterator[Turn]:
        """Yields its calls."""
        made = random.Random(self.seed)
        for _ in range(made.randint(*TURNS)):
            yield Turn(
                answer_tokens=made.randint(*ANSWER_TOKENS),
                result=_text(made, made.randint(*TOOL_TOKENS)),
                pause_s=made.uniform(*PAUSE_S),
            )


def agents(seed: int) -> Iterator[Agent]:
    """Yields attempts without end, those of a group one after the other."""
    made = random.Random(seed)
    system = _text(made, SYSTEM_TOKENS)
    while True:
        task = _text(made, TASK_TOKENS)
        for _ in range(GROUP):
            yield Agent(system=system, task=task, seed=made.getrandbits(32))


def _text(made: random.Random, tokens: int) -> str:
    return made.randbytes(tokens * BYTES_PER_TOKEN // 2).hex()
