"""A server of OpenEnv for the tests: a number is guessed. `python openenv_server.py PORT`."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    """A guess."""

    text: str


class Answer(Observation):
    """How far off it was."""

    said: str


class Guessing(Environment[Guess, Answer, State]):
    """Rewards more the nearer a guess is; ends with the right one, or after five."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._number = 0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Answer:
        """Begins an episode."""
        self._number, self._state = random.Random(seed).randrange(20), State(episode_id=episode_id)
        return Answer(said="Guess a number below 20.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Answer:
        """Takes a guess."""
        self._state.step_count += 1
        off = abs(int(action.text) - self._number)
        over = off == 0 or self._state.step_count >= 5
        return Answer(said=f"Off by {off}.", reward=1 / (1 + off), done=over)

    @property
    def state(self) -> State:
        """The state of the episode."""
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Answer, max_concurrent_envs=32)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
