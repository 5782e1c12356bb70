"""Adds four numbers with two agents: a planner splits the sum into parts, and a solver works out each part.

An ordinary program on the vendor's SDK. The header `x-fulmen-agent` says who calls. Run by hand it answers one task:

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
    """Lets one of the agents answer."""
    completion = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": text}],
        max_tokens=MAX_ANSWER_TOKENS,
        extra_headers={"x-fulmen-agent": role},
    )
    return completion.choices[0].message.content or ""


async def work(question: str, *, planner: str, solver: str) -> dict:
    """Plans, solves the parts at once, and adds up what the solver answered.

    Args:
        question: Such as `3+8+2+5`.
        planner: Model of the planner.
        solver: Model of the solver.

    Returns:
        The parts, their answers, and the sum of these; no answer if the plan or a part came to nothing.
    """
    parts = (await ask("planner", planner, f"{question}?")).split(" ")
    if not all(PART.fullmatch(part) for part in parts):
        return {"parts": [], "answers": [], "answer": ""}
    answers = await asyncio.gather(*(ask("solver", solver, f"{part}=") for part in parts))
    total = sum(map(int, answers)) if all(map(str.isdecimal, answers)) else ""
    return {"parts": parts, "answers": list(answers), "answer": str(total)}


async def solve(task: dict) -> dict:
    """Lets both agents ask the same model."""
    return await work(task["input"]["question"], planner=MODEL, solver=MODEL)


async def solve_with_adapters(task: dict) -> dict:
    """Lets each agent ask for its own adapter of the model."""
    return await work(task["input"]["question"], planner=f"{MODEL}.planner", solver=f"{MODEL}.solver")


if __name__ == "__main__":
    print(asyncio.run(solve(json.load(sys.stdin))))
