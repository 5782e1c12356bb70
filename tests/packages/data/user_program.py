"""What a user writes against what is installed: `assert_type` says what type checkers must find, and the comments what they must refuse."""

from __future__ import annotations

from typing import Any, assert_type

import fulmen
from fulmen.client.rollouts import Rollout
from fulmen.hooks import AttemptEnd, AttemptFacts, Hook
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_cli.exits import Exit
from fulmen_exchange.settings import OuterLoopSettings
from fulmen_llm_proxy.settings import LlmProxySettings
from fulmen_runner.settings import RunnerSettings
from fulmen_service_kit.security.tokens import Role, TokenSigner
from fulmen_store.settings import StoreSettings


class Watch(Hook):
    """Looks at how attempts end."""

    async def on_rollout_end(self, attempt: AttemptFacts, end: AttemptEnd) -> None:
        assert_type(end.succeeded, bool)


def grade(task: dict[str, Any], outcome: object) -> float:
    """Grades an outcome."""
    fulmen.emit_reward(0.5)
    return float(outcome == task["answer"])


def train(client: fulmen.Client) -> list[Rollout]:
    """Trains."""
    run = client.train(agent="agent.py:solve", reward=grade, tasks=[{"input": 1}], algorithm=fulmen.GRPO(steps=2))
    for step in run:
        assert_type(step.reward, float | None)
    return list(run.rollouts(filter="reward < 0.5"))


def parts_of_services(algorithm: AlgorithmServiceSettings) -> tuple[str, int]:
    """Uses what the other distributions offer."""
    assert_type(algorithm.metrics_port, int)
    assert_type(OuterLoopSettings(kind="outer", momentum=0.9).momentum, float)
    settings: tuple[type, ...] = (LlmProxySettings, RunnerSettings, StoreSettings)
    token = TokenSigner("k" * 32).issue(Role.CLIENT, subject="me", ttl_s=60, project="projects/default")
    return f"{token} {settings}", Exit.CONFLICT


def refused(client: fulmen.Client) -> None:
    """Does what type checkers must refuse: without types everything would pass."""
    client.rollouts.get(3)  # type: ignore[arg-type]
    OuterLoopSettings(kind="outer", momentum="much")  # type: ignore[arg-type]
    fulmen.GRPO(stepz=2)  # type: ignore[call-arg]
    print(Exit.NO_SUCH_STATUS)  # type: ignore[attr-defined]
