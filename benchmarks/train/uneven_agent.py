"""The arithmetic agent as one that takes its time: most tasks a fraction of a second, a few many seconds.

Half of the time passes before the model is asked and half after, as when an environment is set up and an answer is
tried out. How long a task takes is a function of its id, so that it is the same in every run. Validation tasks take no
time but the model's: both sides are measured alike, and the measurement is not what is measured.
"""

import asyncio
import random

import agent  # type: ignore[import-not-found]  # the example's, beside which this file is copied

MEDIAN_S = 0.3
SIGMA = 1.25
LONGEST_S = 10.0


def seconds(task_id: str) -> float:
    """Draws how long a task takes, from a lognormal distribution."""
    if not task_id.startswith("train"):
        return 0.0
    return min(MEDIAN_S * random.Random(task_id).lognormvariate(0.0, SIGMA), LONGEST_S)


async def solve(task: dict) -> str:
    """Answers like the arithmetic agent, but slower."""
    half_s = seconds(task["id"]) / 2
    await asyncio.sleep(half_s)
    answer = await agent.solve(task)
    await asyncio.sleep(half_s)
    return answer
