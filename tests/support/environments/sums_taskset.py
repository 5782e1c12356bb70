"""A taskset of verifiers, for the tests: sums, scored by two rules, with a harness that asks once in its own process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf


class SumData(vf.TaskData):
    """A sum with its answer."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Scores the last answer."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """1 for the right number."""
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        """More for shorter answers."""
        return 1 / (1 + len(trace.last_reply))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Characters of the answer."""
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask]):
    """Fifty sums."""

    def load(self) -> Iterable[SumTask]:
        """Yields the tasks."""
        for number in range(50):
            yield SumTask(SumData(prompt=f"What is {number} plus 7?", answer=str(number + 7)), self.config.task)


class AskingConfig(vf.HarnessConfig):
    """Has no settings of its own."""


class Asking(vf.Harness[AskingConfig]):
    """Asks the model once."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> vf.ProgramResult:
        """Sends one request to the endpoint that verifiers gives it."""
        body = {"model": ctx.model, "messages": [{"role": "user", "content": data.prompt}]}
        async with httpx.AsyncClient(timeout=60) as client:
            headers = {"Authorization": f"Bearer {secret}"}
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return vf.ProgramResult(exit_code=0 if answer.is_success else 1, stdout=answer.text, stderr=answer.text)


__all__ = ["Asking", "Sums"]
