"""A data set of preferences that a tiny model learns."""

from __future__ import annotations

import json

from tests.support.algorithm.model_services import World

__all__ = ["add_preferences", "preference"]


def preference(number: int) -> dict[str, object]:
    """Prefers the short answer to the same question twice over."""
    question = f"{number % 10}+{number // 10}="
    right = str(number % 10 + number // 10)
    return {
        "prompt": [{"role": "user", "content": question}],
        "chosen": [{"role": "assistant", "content": right}],
        "rejected": [{"role": "assistant", "content": f"{right}{right}"}],
    }


def add_preferences(world: World, count: int) -> str:
    """Adds a data set of so many preferences to a world; returns its version."""
    lines = "\n".join(json.dumps(preference(number)) for number in range(count))
    return world.add_resource("resources/dataset.preferences", lines.encode())
