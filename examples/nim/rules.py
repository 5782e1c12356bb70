"""Nim with one heap and a limit: a player takes one or more, up to the limit; who takes the last one wins.

A board such as `17 3` has 17 left and the limit 3; a move is the number that is taken.
"""

LIMITS = (2, 3, 4)
MOST = 16
"""Largest heap."""


def read(board: str) -> tuple[int, int]:
    """Returns what is left, and the limit."""
    left, limit = map(int, board.split(" "))
    return left, limit


def moves(board: str) -> list[str]:
    """Returns the moves that are allowed; none at the end."""
    return [str(taken) for taken in range(1, min(read(board)) + 1)]


def moved(board: str, move: str) -> str:
    """Returns the board after a move."""
    left, limit = read(board)
    return f"{left - int(move)} {limit}"


def best(board: str) -> list[str]:
    """Returns the moves of a perfect player, who leaves a multiple of the limit and one; any if that is impossible."""
    left, limit = read(board)
    return [str(left % (limit + 1))] if left % (limit + 1) else moves(board)
