"""Plays one of the games with its tool: an ordinary program on the vendor's SDK."""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI
from rules import GAMES

MODEL = "player"
client = AsyncOpenAI()


async def solve(task: dict[str, Any]) -> str:
    """Returns the moves and the answer, as JSON; the answer is empty if the player never stops calling the tool."""
    game = GAMES[task["input"]["game"]](task["input"]["setup"])
    parameters = {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]}
    tools: Any = [{"type": "function", "function": {"name": game.tool, "parameters": parameters}}]
    messages: list[Any] = [{"role": "user", "content": game.opening}]
    moves: list[str] = []
    for _ in range(game.turns):
        completion = await client.chat.completions.create(model=MODEL, messages=messages, tools=tools)
        said = completion.choices[0].message
        if not said.tool_calls:
            return json.dumps({"moves": moves, "answer": said.content or ""})
        messages.append(said.model_dump(exclude_none=True))
        for call in said.tool_calls:
            assert call.type == "function"
            moves.append(_value(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": game.use(moves[-1])})
    return json.dumps({"moves": moves, "answer": ""})


def _value(arguments: str) -> str:
    """Reads the tool's argument; empty if the model wrote something else."""
    try:
        return str(json.loads(arguments)["value"])
    except (ValueError, TypeError, KeyError):
        return ""
