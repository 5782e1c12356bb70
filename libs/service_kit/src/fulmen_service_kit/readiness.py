"""Readiness of a service: `/readyz` beside `/metrics`."""

import json
from collections.abc import Callable
from dataclasses import dataclass

Probe = Callable[[], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    probe: Probe
    is_needed: bool


class Readiness:
    """The dependencies of a service. Probes are called from other threads and must not block."""

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}

    def add(self, name: str, probe: Probe, *, is_needed: bool = True) -> None:
        """Adds a dependency.

        Args:
            name: Name, such as `database`.
            probe: Returns the problem, empty if there is none.
            is_needed: Whether a problem makes the service not ready; otherwise it is only reported.
        """
        self._parts[name] = _Part(probe=probe, is_needed=is_needed)

    def report(self) -> tuple[bool, dict[str, str]]:
        """Returns whether the service is ready, and the state of each part."""
        found = {name: part.probe() for name, part in self._parts.items()}
        ready = not any(problem for name, problem in found.items() if self._parts[name].is_needed)
        return ready, {name: problem or "ok" for name, problem in found.items()}

    def page(self) -> tuple[bool, bytes]:
        """Returns whether the service is ready, and the body of `/readyz`."""
        ready, parts = self.report()
        return ready, json.dumps({"ready": ready, "parts": parts}).encode() + b"\n"
