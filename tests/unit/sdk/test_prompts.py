"""An agent gets the prompt of its rollout, and its own where there is none."""

import json
import time

import pytest

import fulmen
from fulmen.agent import PROMPTS_VARIABLE, Context, NotInAttempt, entered


def context(**prompts: str) -> Context:
    """Returns an attempt whose rollout gives prompts."""
    environment = {PROMPTS_VARIABLE: json.dumps(prompts)} if prompts else {}
    return Context(
        rollout="projects/default/rollouts/1", attempt="projects/default/rollouts/1/attempts/1", attempt_number=1, mode="train",
        deadline=time.monotonic() + 60, environment=environment,
    )  # fmt: skip


def test_the_rollout_decides_which_prompt_it_is() -> None:
    with entered(context(prompt="theirs", other="another")):
        assert fulmen.prompt("mine") == "theirs"
        assert fulmen.prompt("mine", name="other") == "another"
        assert fulmen.prompt("mine", name="third") == "mine"


def test_an_agent_that_is_run_by_hand_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROMPTS_VARIABLE, raising=False)
    assert fulmen.prompt("mine") == "mine"
    monkeypatch.setenv(PROMPTS_VARIABLE, '{"prompt": "from the environment"}')
    assert fulmen.prompt("mine") == "from the environment"


def test_a_prompt_that_nobody_gives_is_an_error() -> None:
    with entered(context()), pytest.raises(NotInAttempt, match="has no prompt 'prompt'"):
        fulmen.prompt()
