"""Adds four digits with four agents: a planner splits the sum, an executor computes the parts, a verifier checks them, and a
generator writes the answer.

An ordinary program on the vendor's SDK. The header `x-fulmen-agent` names the caller. Run by hand, it answers one task:

    echo '{"input": {"question": "3+8+2+5"}}' | python agent.py
"""

import asyncio
import json
import re
import sys

from openai import AsyncOpenAI

MODEL = "four-roles"
MAX_ANSWER_TOKENS = 8
PART = re.compile(r"\d\+\d")
YES, NO = "y", "n"

client = AsyncOpenAI()


async def ask(role: str, text: str) -> str:
    """Returns the answer of one of the agents."""
    completion = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": text}],
        max_tokens=MAX_ANSWER_TOKENS,
        extra_headers={"x-fulmen-agent": role},
    )
    return completion.choices[0].message.content or ""


async def compute(part: str) -> list:
    """Has a part computed and checked, and computed again if the verifier answers no; returns results with verdicts."""
    found = []
    for _ in range(2):
        result = await ask("executor", f"{part}=")
        found.append([result, await ask("verifier", f"{part}={result}!")])
        if found[-1][1] != NO:
            break
    return found


async def solve(task: dict) -> dict:
    """Returns the parts, their results, and the answer; no answer if the plan or a result is invalid."""
    parts = (await ask("planner", f"{task['input']['question']}?")).split(" ")
    if not all(PART.fullmatch(part) for part in parts):
        return {"parts": [], "computed": [], "answer": ""}
    computed = list(await asyncio.gather(*map(compute, parts)))
    results = [tries[-1][0] for tries in computed]
    answer = ""
    if all(map(str.isdecimal, results)):
        answer = await ask("generator", "+".join(results) + "~")
    return {"parts": parts, "computed": computed, "answer": answer}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(solve(json.load(sys.stdin)))))
