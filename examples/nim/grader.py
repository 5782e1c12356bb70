"""Scores a game: each player by its own result."""

WON, UNEARNED, LOST, FAULT = 1.0, 0.5, 0.0, -1.0


def grade(task: dict, outcome: dict) -> dict:
    """Returns the result of each player, as `first` and `second`; `reward` is 1.0 if the first won.

    A move that is not allowed is worse than a lost game: in a lost position a player would otherwise have no reason to prefer one
    that is. The other has not earned its win then.
    """
    won, lost = (UNEARNED, FAULT) if outcome["fault"] else (WON, LOST)
    first = outcome["winner"] == "first"
    return {"reward": float(first), "first": won if first else lost, "second": lost if first else won}
