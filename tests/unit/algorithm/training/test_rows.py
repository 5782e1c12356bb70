import pytest

from fulmen_algorithm.training.rows import Row, row_from_completion

GOOD = {
    "rollout_id": "a",
    "token_ids": (1, 2),
    "loss_mask": (False, True),
    "old_logprobs": (0.0, -1.0),
    "advantages": (0.0, 1.0),
    "policy_versions": (-1, 0),
}


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": ()},
        {"loss_mask": (False,)},
        {"loss_mask": (True, True)},
        {"old_logprobs": (0.0, float("nan"))},
        {"advantages": (0.0, float("inf"))},
        {"advantages": (1.0, 1.0)},
        {"advantages": (1.0,)},
    ],
)
def test_rows_that_could_not_train_are_refused(change):
    Row(**GOOD)
    with pytest.raises(ValueError, match=r"token|entries|finite"):
        Row(**{**GOOD, **change})


def test_a_completion_trains_and_its_prompt_does_not():
    row = row_from_completion(
        rollout_id="a", prompt_ids=[5, 6], completion_ids=[7, 8, 9], logprobs=[-1, -2, -3], advantage=0.5, version=4
    )
    assert row.token_ids == (5, 6, 7, 8, 9)
    assert row.loss_mask == (False, False, True, True, True)
    assert row.old_logprobs == (0, 0, -1, -2, -3)
    assert row.policy_versions == (-1, -1, 4, 4, 4)
    assert row.advantages == (0, 0, 0.5, 0.5, 0.5)
    assert row.trained_tokens == 3
