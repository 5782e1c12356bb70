"""What the caller decides about a local stack."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["StackSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSettings:
    """What the caller decides about a stack.

    Attributes:
        state_dir: folder of everything that the stack keeps.
        runners: how many runner processes to begin with; at least 1.
        most_runners: how many there may be later; None: no more.
        slots: how many attempts each runner runs at once; None leaves it to the runner.
        ports: ports asked for by number; the others are the last ones, the defaults, or free ones.
        use_default_ports: whether the well-known ports are tried at all; tests take free ones at once.
        environment: variables that are added to the environment of the services.
    """

    state_dir: Path
    runners: int = 1
    most_runners: int | None = None
    slots: int | None = None
    ports: dict[str, int] = field(default_factory=dict)
    use_default_ports: bool = True
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def room_for_runners(self) -> int:
        """For how many runners there are ports."""
        return max(self.runners, self.most_runners or 0)
