"""What agents and graders leave behind: rewards files, scores, and what clients read of errors. The first byte chooses."""

from __future__ import annotations

import random

from fulmen.scores import read_scores, score_of_line
from fulmen.train_toml.reader import ConfigError
from fulmen_runner.agents.rewards_file import read_rewards
from fulmen_runner.attempts.errors import AgentFailed, HostUnavailable
from tests.fuzz.mutation import mutate_json
from tests.fuzz.target import PureTarget


def run(data: bytes) -> None:
    """Reads a file of rewards, or of scores."""
    if data[:1] == b"s":
        read_scores(data[1:])
    elif data[:1] == b"l":
        score_of_line(data[1:])
    else:
        read_rewards(data[1:])


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes one line."""
    lines = data[1:].split(b"\n")
    place = rng.randrange(len(lines))
    lines[place] = mutate_json(lines[place], rng)
    return data[:1] + b"\n".join(lines)


TARGET = PureTarget(
    run=run,
    seeds=[
        b'r{"value": 0.5, "dimension": "style", "step": 3, "span_id": "00f067aa0ba902b7"}\n{"undelivered_spans": 2}\n{"value": 1}',
    ],
    mutate=mutate,
    refusals=(AgentFailed, HostUnavailable, ConfigError, ValueError),
)
