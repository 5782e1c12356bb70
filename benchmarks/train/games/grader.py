"""Plays the moves again, and scores 1 for a win."""

import json
from typing import Any

from rules import GAMES


def grade(task: dict[str, Any], outcome: str) -> float:
    """Returns 1.0 if the play was won, else 0.0."""
    played = json.loads(outcome)
    game = GAMES[task["input"]["game"]](task["input"]["setup"])
    for move in played["moves"]:
        game.use(move)
    return float(game.won(played["answer"]))
