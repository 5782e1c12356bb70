"""A text environment of the tests: a number is guessed, and each answer says how far off it was."""

from __future__ import annotations

from typing import Any

import gymnasium


class Guess(gymnasium.Env[str, str]):
    """Rewards 1 for the number, and less the farther a guess is off; ends after five guesses."""

    def __init__(self, limit: int = 10, render_mode: str | None = None) -> None:
        self.render_mode = render_mode
        self.limit = limit
        self.action_space = gymnasium.spaces.Text(3, charset="0123456789")
        self.observation_space = gymnasium.spaces.Text(60, charset="Guess a number below0123456789Off by.")
        self._number, self._guesses = 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """Begins an episode."""
        super().reset(seed=seed)
        self._number, self._guesses = int(self.np_random.integers(self.limit)), 0
        return f"Guess a number below {self.limit}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Takes a guess."""
        self._guesses += 1
        off = abs(int(action) - self._number)
        return f"Off by {off}.", 1 / (1 + off), off == 0, self._guesses >= 5, {}


gymnasium.register("Guess-v0", entry_point=Guess)
