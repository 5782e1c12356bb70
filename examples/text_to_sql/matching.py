"""Compares statements by what they return on the two databases of a task.

The agent never sees the second, which has other contents, so that a statement that is right by chance is detected.
"""

from collections import Counter
from typing import Any

from shop import Result, run

HIDDEN = 1000
"""Distance of the second database's seed."""
DIGITS = 6
"""Of a number with a fraction, which may depend on the order of a sum."""


def fault(task: dict[str, Any], sql: object) -> str:
    """Says what is wrong with a statement; empty if nothing is."""
    if not isinstance(sql, str) or not sql:
        return "no statement"
    for seed in (task["input"]["database"], task["input"]["database"] + HIDDEN):
        expected, found = run(task["query"], seed), run(sql, seed)
        if found.error:
            return f"database {seed}: {found.error}"
        if not same(expected, found, ordered="ORDER BY" in task["query"]):
            return f"database {seed}: the rows differ from those of {task['query']}"
    return ""


def same(one: Result, other: Result, *, ordered: bool) -> bool:
    """Returns whether two results have the same rows; if `ordered`, in the same order."""
    rows, others = ([tuple(map(_rounded, row)) for row in result.rows] for result in (one, other))
    return rows == others if ordered else Counter(rows) == Counter(others)


def _rounded(value: object) -> object:
    return round(value, DIGITS) if isinstance(value, float) else value
