import random
from pathlib import Path

import pytest
import torch

from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row, row_from_completion
from tests.support.algorithm.models import small_model
from tests.support.algorithm.run_service import (  # noqa: F401  (fixtures)
    carry_out,
    grpo_draft,
    open_service,
    service,
    sft_draft,
    tiny_model,
    world,
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model of the arithmetic example's family."""
    torch.set_num_threads(1)
    return small_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def policy(model_dir: Path) -> PolicyModel:
    return PolicyModel.load(model_dir)


@pytest.fixture
def rows() -> list[Row]:
    """Rows of different lengths, two of them of one rollout."""
    chance = random.Random(5)
    made = []
    for index in range(9):
        completion = [chance.randrange(6, 25) for _ in range(chance.randrange(1, 6))]
        made.append(
            row_from_completion(
                rollout_id=f"rollout-{min(index, 7)}",
                prompt_ids=[chance.randrange(25) for _ in range(chance.randrange(1, 7))],
                completion_ids=completion,
                logprobs=[-chance.uniform(0.5, 4.0) for _ in completion],
                advantage=chance.uniform(-1, 1),
                version=index % 3,
            )
        )
    return made
