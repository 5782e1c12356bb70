"""Finds the stack started by `fulmen up` on this machine.

The local stack is a separate distribution, registered under the entry point group `fulmen.local_stack`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

from fulmen.client import Client, Targets, connect

__all__ = ["DEFAULT_STATE_DIR", "LocalStack", "LocalStackMissing", "connect_local", "find_local_stack"]

ENTRY_POINTS: Final = "fulmen.local_stack"
DEFAULT_STATE_DIR: Final = Path(".fulmen")


class LocalStackMissing(Exception):
    """Raised when no local stack is installed or running."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStack:
    """A running local stack.

    Attributes:
        targets: Addresses of its services.
        token: Token of the role client.
    """

    targets: Targets
    token: str | None = field(repr=False)


def find_local_stack(state_dir: Path = DEFAULT_STATE_DIR) -> LocalStack:
    """Returns the local stack running on a state directory.

    Raises:
        LocalStackMissing: if none is installed or running there.
    """
    for entry_point in entry_points(group=ENTRY_POINTS):
        find: Callable[[Path], LocalStack | None] = entry_point.load()
        stack = find(state_dir)
        if stack is None:
            raise LocalStackMissing(f"no stack is running on {state_dir}: start one with `fulmen up`")
        return stack
    raise LocalStackMissing('the local stack is not installed: pip install "fulmen[local]"')


def connect_local(state_dir: Path = DEFAULT_STATE_DIR) -> AbstractAsyncContextManager[Client]:
    """Opens channels to the local stack running on a state directory.

    Raises:
        LocalStackMissing: if none is installed or running there.
    """
    stack = find_local_stack(state_dir)
    return connect(stack.targets, token=stack.token)
