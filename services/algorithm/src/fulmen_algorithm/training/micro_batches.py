"""Rows in micro-batches, shared among ranks, and the pass over them that computes log-probabilities."""

from collections.abc import Iterator, Sequence

import torch

from fulmen_algorithm.training.packing import Layout, MicroBatch, empty_micro_batch, micro_batch
from fulmen_algorithm.training.parallel import layouts_of
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.training.settings import StepSettings


def micro_batches(
    policy: PolicyModel, rows: Sequence[Row], settings: StepSettings
) -> tuple[Iterator[MicroBatch], float]:
    """Builds this rank's micro-batches of some rows; also returns the share of tokens in all ranks' positions.

    Each holds rows of one adapter, which is in use when the micro-batch is taken.

    All ranks of a copy of the weights have as many micro-batches: empty ones fill up.
    """
    mode, copy = policy.packing(settings.packing), policy.groups.copy
    ranks, of_copy = policy.groups.sharing(policy.ranks)
    speeds = policy.speeds.by_rank if policy.speeds is not None else ()
    by_adapter: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_adapter.setdefault(policy.adapter_of(row), []).append(index)
    mine: list[tuple[str, list[Layout], int]] = []
    positions = 0
    for adapter, indices in sorted(by_adapter.items()):
        part = [rows[i] for i in indices]
        shares = layouts_of(part, ranks, token_budget=settings.token_budget, mode=mode, speeds=speeds)
        positions += sum(layout.size_tokens for share in shares for layout in share)
        missing = max(map(len, shares[of_copy])) - len(shares[ranks.rank])
        mine.append((adapter, [layout.renumbered(indices) for layout in shares[ranks.rank]], missing))

    def made() -> Iterator[MicroBatch]:
        for adapter, layouts, missing in mine:
            policy.use_adapter(adapter)
            for layout in layouts:
                if ranks.way_out is not None and copy.group is None:
                    ranks.way_out.check()
                yield micro_batch(rows, layout, pad_token_id=policy.pad_token_id, mode=mode)
            for _ in range(missing):
                yield empty_micro_batch(pad_token_id=policy.pad_token_id)

    return made(), sum(len(row.token_ids) for row in rows) / max(positions, 1)


@torch.no_grad()
def logprobs_of(
    policy: PolicyModel, rows: Sequence[Row], *, settings: StepSettings, trained_only: bool = False
) -> list[list[float]]:
    """Computes each row's per-token log-probabilities under `policy`, in the order of `rows`.

    With `trained_only` those of the tokens that train, and 0.0 for the others: of a long prompt no logits are computed.
    """
    ranks = policy.ranks
    found: dict[int, list[float]] = {}
    for micro in micro_batches(policy, rows, settings)[0]:
        logprobs = policy.token_logprobs(micro, temperature=settings.temperature, trained_only=trained_only)
        for index, value in zip(micro.row_index_BT.flatten().tolist(), logprobs.flatten().tolist(), strict=True):
            if index >= 0:
                found.setdefault(index, []).append(value)
    everything = {index: values for part in ranks.gather(found) for index, values in part.items()}
    return [everything[index] for index in range(len(rows))]
