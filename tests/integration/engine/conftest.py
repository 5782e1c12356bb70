"""A generation engine on a real socket, in this process, so that tests can hold its model thread at a token."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fulmen_algorithm.clients.forked_child import ModuleStarter
from fulmen_algorithm.training.policy import PolicyModel
from tests.support.algorithm.embedded_engine import engine, model_dirs, options  # noqa: F401  (fixtures)
from tests.support.algorithm.warm import warm_modules


@pytest.fixture(scope="session")
def modules() -> ModuleStarter:
    """Starts engines that share one import of torch."""
    return warm_modules()


@pytest.fixture(scope="session")
def policies(model_dirs: list[Path]) -> list[PolicyModel]:  # noqa: F811  (the fixture)
    """The same two models, to compute what the engine should have computed."""
    return [PolicyModel.load(directory) for directory in model_dirs]


@pytest.fixture
def greedy_without_end(policies: list[PolicyModel]) -> Iterator[str]:
    """A question that the first model answers greedily for at least 60 tokens."""
    policy = policies[0]
    for number in range(10, 100):
        question = f"{number}+1="
        ids = policy.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for _ in range(60):
            with torch.no_grad():
                ids = [*ids, int(policy.model(torch.tensor([ids])).logits[0, -1].argmax())]
        if policy.tokenizer.eos_token_id not in ids:
            yield question
            return
    raise AssertionError("No question keeps the model talking.")
