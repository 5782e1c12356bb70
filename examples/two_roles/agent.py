"""Adds four numbers with two agents: a planner splits the sum into parts, and a solver computes each part.

An ordinary program on the vendor's SDK. The header `x-fulmen-agent` names the caller. Run by hand, it answers one task:

    echo '{"input": {"question": "3+8+2+5"}}' | python agent.py
"""

import asyncio
import json
import re
import sys

from openai import AsyncOpenAI

MODEL = "two-roles"
MAX_ANSWER_TOKENS = 8
PART = re.compile(r"(\d)\+(\d)")

client = AsyncOpenAI()


async def ask(role: str, model: str, text: str) -> str:
    """Returns the answer of one of the agents."""
    completion = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=MAX_ANSWER_TOKENS,
        extra_headers={"x-fulmen-agent": role},
    )
    return completion.choices[0].message.content or ""


async def work(question: str, *, planner: str, solver: str) -> dict:
    """Plans, solves the parts concurrently, and adds up the solver's answers.

    Args:
        question: Sum, such as `3+8+2+5`.
        planner: Model of the planner.
        solver: Model of the solver.

    Returns:
        The parts, their answers, and the sum of the answers; no sum if the plan or a part failed.
    """
    parts = (await ask("planner", planner, f"{question}?")).split(" ")
    if not all(PART.fullmatch(part) for part in parts):
        return {"parts": [], "answers": [], "answer": ""}
    answers = await asyncio.gather(*(ask("solver", solver, f"{part}=") for part in parts))
    total = sum(map(int, answers)) if all(map(str.isdecimal, answers)) else ""
    return {"parts": parts, "answers": list(answers), "answer": str(total)}


async def solve(task: dict) -> dict:
    """Solves a task with the same model for both agents."""
    return await work(task["input"]["question"], planner=MODEL, solver=MODEL)


async def solve_with_adapters(task: dict) -> dict:
    """Solves a task with a separate adapter of the model for each agent."""
    return await work(task["input"]["question"], planner=f"{MODEL}.planner", solver=f"{MODEL}.solver")


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
