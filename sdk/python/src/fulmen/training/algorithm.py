"""An algorithm with its settings, for `client.train`."""

from __future__ import annotations

from typing import Any

__all__ = ["Algorithm"]


class Algorithm:
    """An algorithm of the service, with the settings that differ from its defaults.

    The service checks the settings when a run is created. Classes such as `fulmen.GRPO` know their types.

    Attributes:
        name: Name of the algorithm, such as `grpo`; `fulmen algorithms` lists all.
        settings: Settings by name; the others have the service's defaults.
    """

    def __init__(self, name: str, /, **settings: Any) -> None:
        """Keeps name and settings.

        >>> Algorithm("grpo", steps=40)
        GRPO(steps=40)
        """
        self.name = name
        self.settings = settings

    def __repr__(self) -> str:
        """Shows name and settings."""
        return f"{self.name.upper()}({', '.join(f'{key}={value!r}' for key, value in self.settings.items())})"

    def __eq__(self, other: object) -> bool:
        """Returns whether name and settings are equal."""
        return isinstance(other, Algorithm) and (other.name, other.settings) == (self.name, self.settings)

    __hash__ = None  # type: ignore[assignment]  # Settings may be changed.
