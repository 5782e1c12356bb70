"""What the resources server of the tests does: a counter to add to, and a sum to tell. The standard library alone."""

from __future__ import annotations

import re
import zlib
from typing import Any

COUNT = 50
TOOL = {
    "type": "function",
    "name": "add",
    "description": "Adds to the counter.",
    "parameters": {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
        "additionalProperties": False,
    },
    "strict": True,
}


def rows() -> list[dict[str, Any]]:
    """Returns the data set."""
    made = []
    for number in range(COUNT):
        asked = [{"role": "user", "content": f"Add {number} to the counter of {number + 3}, and tell the sum."}]
        made.append({"responses_create_params": {"input": asked, "tools": [TOOL]}, "wanted": number * 2 + 3})
    return made


def said(prompt: str, answered: list[str]) -> tuple[str, str]:
    """Returns what the model does: `call` with the arguments of the tool, or `tell` with a text."""
    first, second, *_ = map(int, re.findall(r"\d+", prompt))
    way = zlib.crc32(prompt.encode()) % 5
    if way == 0:
        return "tell", f"It is {first + second}."
    if not answered:
        return "call", "{broken" if way == 1 else f'{{"number": {first if way < 4 else first + 1}}}'
    return "tell", f"The tool said: {answered[-1]}"


def reward(wanted: int, counter: int, outputs: list[dict[str, Any]]) -> float:
    """Scores an episode: the counter of the session, and the number in the last message."""
    texts = ["".join(part.get("text", "") for part in each["content"]) for each in outputs if each["type"] == "message"]
    told = str(wanted) in (texts[-1] if texts else "")
    return 0.75 * (counter == wanted) + 0.25 * told


def begin(row: dict[str, Any]) -> int:
    """Returns the counter of a new session."""
    content = row["responses_create_params"]["input"][0]["content"]
    return int(re.findall(r"\d+", content)[1])
