"""Plays Nim against itself, or against a perfect player.

An ordinary program on the vendor's SDK. The header `x-fulmen-agent` names the player. Run by hand, it plays one game:

    echo '{"input": {"board": "17 3", "against": "itself"}}' | python agent.py
"""

import asyncio
import json
import random
import sys

from openai import AsyncOpenAI
from rules import best, moved, moves

MODEL = "nim"
PLAYERS = ("first", "second")

client = AsyncOpenAI()


async def ask(player: str, board: str) -> str:
    """Returns a player's move."""
    completion = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": board}],
        max_tokens=2,
        extra_headers={"x-fulmen-agent": player},
    )
    return completion.choices[0].message.content or ""


async def solve(task: dict) -> dict:
    """Plays a game; returns who won, the moves, and whether the last one was not allowed, which loses.

    `against` is `itself`, or the name of a perfect player, who is the second then.
    """
    board, against = task["input"]["board"], task["input"]["against"]
    chance = random.Random(board + against)
    made: list = []
    while moves(board):
        player = PLAYERS[len(made) % 2]
        if against != "itself" and player == "second":
            move = chance.choice(best(board))
        else:
            move = await ask(player, board)
        made.append(move)
        if move not in moves(board):
            return {"winner": PLAYERS[len(made) % 2], "moves": made, "fault": True}
        board = moved(board, move)
    return {"winner": PLAYERS[(len(made) - 1) % 2], "moves": made, "fault": False}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(solve(json.load(sys.stdin)))))
