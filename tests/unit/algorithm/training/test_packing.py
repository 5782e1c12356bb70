import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.packing import MicroBatch, plan
from fulmen_algorithm.training.rows import NO_VERSION, Row
from fulmen_algorithm.training.settings import PackingMode, StepSettings
from tests.support.algorithm.micro_batches import pack

PAD = 999


@st.composite
def some_rows(draw) -> list[Row]:
    made = []
    for index in range(draw(st.integers(0, 12))):
        length = draw(st.integers(1, 20))
        mask = (False, *(draw(st.booleans()) for _ in range(length - 1)))
        made.append(
            Row(
                rollout_id=str(index),
                token_ids=tuple(range(index * 100, index * 100 + length)),
                loss_mask=mask,
                old_logprobs=tuple(-float(i) if m else 0.0 for i, m in enumerate(mask)),
                advantages=tuple(index + i / 64 if m else 0.0 for i, m in enumerate(mask)),
                policy_versions=tuple(3 if m else NO_VERSION for m in mask),
            )
        )
    return made


def rebuilt(batches: list[MicroBatch]) -> dict[int, list[tuple]]:
    """Each row's (token, position, trains, logprob, advantage, version), read back from the tensors."""
    found: dict[int, list[tuple]] = {}
    for batch in batches:
        names = ("input_ids_BT", "position_ids_BT", "loss_mask_BT", "old_logprobs_BT", "advantages_BT", "versions_BT")
        columns = [getattr(batch, name).flatten().tolist() for name in names]
        for row, *values in zip(batch.row_index_BT.flatten().tolist(), *columns, strict=True):
            if row >= 0:
                found.setdefault(row, []).append(tuple(values))
            else:
                assert tuple(values) == (PAD, 0, False, 0.0, 0.0, NO_VERSION)
    return found


@given(some_rows(), st.integers(20, 64), st.sampled_from(PackingMode))
def test_no_token_is_lost_and_the_budget_is_kept(rows, budget, mode):
    batches = pack(rows, token_budget=budget, pad_token_id=PAD, mode=mode)
    assert all(batch.input_ids_BT.numel() <= budget for batch in batches)
    assert rebuilt(batches) == {
        index: list(
            zip(
                row.token_ids,
                range(len(row.token_ids)),
                row.loss_mask,
                row.old_logprobs,
                row.advantages,
                row.policy_versions,
                strict=True,
            )
        )
        for index, row in enumerate(rows)
    }


@given(some_rows(), st.integers(20, 64))
def test_attention_masks_mark_exactly_the_tokens(rows, budget):
    for batch in pack(rows, token_budget=budget, pad_token_id=PAD, mode=PackingMode.PADDED):
        assert torch.equal(batch.attention_mask_BT.bool(), batch.row_index_BT >= 0)


def test_a_row_beyond_the_budget_is_refused(rows):
    with pytest.raises(ValueError, match="budget"):
        plan(rows, token_budget=3)


def test_packed_rows_do_not_see_each_other(policy, rows):
    alone = [logprobs_of(policy, [row], settings=StepSettings())[0] for row in rows]
    for mode in PackingMode:
        together = logprobs_of(policy, rows, settings=StepSettings(token_budget=40, packing=mode))
        for row, expected, actual in zip(rows, alone, together, strict=True):
            # The first token of a row has no prediction.
            assert actual[1:] == pytest.approx(expected[1:], abs=1e-5), (mode, row)
