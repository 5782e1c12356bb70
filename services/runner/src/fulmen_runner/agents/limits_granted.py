"""How much of what an agent asks for it gets."""

from typing import Any

from fulmen_runner.agents.specification import Limits


def granted(asked: Limits, most: Limits) -> Limits:
    """Returns what an agent gets: what it asks for, at most `most`; all of that if it asks for nothing."""
    return Limits(
        memory_bytes=_least(asked.memory_bytes, most.memory_bytes),
        cpu_count=_least(asked.cpu_count, most.cpu_count),
        process_count=_least(asked.process_count, most.process_count),
    )


def _least(asked: float, most: float) -> Any:
    return min(asked, most) if asked and most else asked or most
