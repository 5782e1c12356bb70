"""Plans of prepared statements, as PostgreSQL explains them after it has run them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

__all__ = ["explained", "nodes_of"]


def nodes_of(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields a plan and its parts."""
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes_of(part)


async def explained(connection: Any, name: str, arguments: tuple[object, ...]) -> dict[str, Any]:
    """Runs a prepared statement, undoes what it did, and returns its plan with what it looked at."""
    values = f"({', '.join(map(_literal, arguments))})" if arguments else ""
    transaction = connection.transaction()
    await transaction.start()
    try:
        told = await connection.fetchval(
            f"explain (analyze, costs off, timing off, format json) execute {name.split()[0]} {values}"
        )
    finally:
        await transaction.rollback()
    plan: dict[str, Any] = json.loads(told)[0]["Plan"]
    return plan


def _literal(value: object) -> str:
    match value:
        case None:
            return "null"
        case list():
            parts = ("null" if each is None else f'"{_text(each)}"' for each in value)
            return "'{" + ",".join(parts) + "}'"
        case _:
            return f"'{_text(value)}'"


def _text(value: object) -> str:
    return "" if value == b"" else str(value)
