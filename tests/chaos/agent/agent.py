"""Asks a model twice: an ordinary program on the vendor's SDK that makes no mistakes of its own."""

from openai import AsyncOpenAI

MODEL = "chaos"
TURNS = 2

client = AsyncOpenAI()


async def play(task: dict) -> str:
    """Returns what the model said, turn by turn."""
    question = {"role": "user", "content": task["input"]["question"]}
    messages: list = [question]
    said = []
    for _ in range(TURNS):
        completion = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
        answer = completion.choices[0].message.content or ""
        said.append(answer)
        messages += [{"role": "assistant", "content": answer}, question]
    return "|".join(said)
