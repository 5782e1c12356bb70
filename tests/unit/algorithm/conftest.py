import importlib.util
import random
from pathlib import Path

import pytest
import torch

from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row, row_from_completion
from tests.support.algorithm.run_service import (  # noqa: F401  (fixtures)
    grpo_draft,
    open_service,
    sft_draft,
    tiny_model,
    world,
)

MAKE_MODEL = Path(__file__).resolve().parents[3] / "examples" / "arithmetic" / "make_model.py"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model of the arithmetic example's family."""
    torch.set_num_threads(1)
    directory = tmp_path_factory.mktemp("model")
    spec = importlib.util.spec_from_file_location("make_model", MAKE_MODEL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build(str(directory), 0, hidden=32, layers=2, heads=2, mlp=64)
    return directory


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
