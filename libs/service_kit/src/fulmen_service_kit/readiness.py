"""Whether a service can do its work, and what stands in the way: `/readyz` beside `/metrics`, for probes and people."""

import json
from collections.abc import Callable
from dataclasses import dataclass

Probe = Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    probe: Probe
    is_needed: bool


class Readiness:
    """The parts that a service depends on. Asked from other threads; a probe only looks at what is known already."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}

    def add(self, name: str, probe: Probe, *, is_needed: bool = True) -> None:
        """Adds a part.

        Args:
            name: Such as `database`.
            probe: Returns what is wrong with it, for people; empty if nothing is.
            is_needed: Whether the service is of no use without it. What is not needed is told, and counts for nothing.
        """
        self._parts[name] = _Part(probe=probe, is_needed=is_needed)

    def report(self) -> tuple[bool, dict[str, str]]:
        """Returns whether the service is ready, and how each part is."""
        found = {name: part.probe() for name, part in self._parts.items()}
        ready = not any(problem for name, problem in found.items() if self._parts[name].is_needed)
        return ready, {name: problem or "ok" for name, problem in found.items()}

    def page(self) -> tuple[bool, bytes]:
        """Returns whether the service is ready, and the body of `/readyz`."""
        ready, parts = self.report()
        return ready, json.dumps({"ready": ready, "parts": parts}).encode() + b"\n"
