"""Asks a model twice, and takes its time; runs as a Python agent and, as a program, as a command."""

import json
import os
import sys
import time
import urllib.request

MODEL = "chaos"
TURNS = 2
CALL_LIMIT_S = 300.0


def wait(pace_file: str) -> None:
    """Waits as long as the file says, in seconds; the matrix lets a run hurry to its end by it."""
    with open(pace_file, encoding="utf-8") as file:  # noqa: PTH123  # A user's agent.
        time.sleep(float(file.read() or 0))


async def play(task: dict) -> str:
    """Returns what the model said, turn by turn."""
    import asyncio

    from openai import AsyncOpenAI

    question = {"role": "user", "content": task["input"]["question"]}
    messages: list = [question]
    said = []
    client = AsyncOpenAI()
    for _ in range(TURNS):
        await asyncio.to_thread(wait, task["input"]["pace_file"])
        completion = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=8)
        said.append(completion.choices[0].message.content or "")
        messages += [{"role": "assistant", "content": said[-1]}, question]
    return "|".join(said)


def main() -> None:
    """Plays the task of standard input without any package, and prints what was said."""
    task = json.load(sys.stdin)["input"]
    question = {"role": "user", "content": task["question"]}
    messages, said = [question], []
    for _ in range(TURNS):
        wait(task["pace_file"])
        request = urllib.request.Request(  # The address is the proxy's.
            os.environ["OPENAI_BASE_URL"] + "/chat/completions",
            data=json.dumps({"model": MODEL, "messages": messages, "max_tokens": 8}).encode(),
            headers={"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=CALL_LIMIT_S) as answer:  # As above.
            said.append(json.load(answer)["choices"][0]["message"]["content"] or "")
        messages += [{"role": "assistant", "content": said[-1]}, question]
    sys.stdout.write("|".join(said))


if __name__ == "__main__":
    main()
