"""The reward: 1 if both checks pass and a judge, which is a model, finds the answer clear; else 0."""

from checks import check
from openai import AsyncOpenAI

JUDGE = "judge"
QUESTION = "Does the answer say plainly what happens to the order? Answer with yes or no.\n\nCustomer: {message}\nAnswer: {text}"


async def grade(task: dict, outcome: dict) -> dict[str, float]:
    """Returns the reward and its parts."""
    found = check(outcome)
    asked = QUESTION.format(message=outcome["message"], text=outcome["text"])
    async with AsyncOpenAI() as client:
        verdict = await client.chat.completions.create(model=JUDGE, messages=[{"role": "user", "content": asked}])
    found["clear"] = float((verdict.choices[0].message.content or "").strip().lower().startswith("yes"))
    return {"reward": min(found.values()), **found}
