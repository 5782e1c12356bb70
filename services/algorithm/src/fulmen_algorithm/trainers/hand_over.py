"""How the ranks that are left of a group hand their state over to a new one, in a folder.

Every optimiser step is decided by numbers that are gathered from all ranks. So copies of the weights differ by no more
than the newest step: some have its numbers and have taken it, the others wait for them. The copy that has taken the most
steps leads and writes its state. Every rank that is left writes what is its own: residuals and random generators.

Invariant: what is written is the state between two steps. A step in which a rank was is written as it was before it.
"""

from dataclasses import asdict
from pathlib import Path

import torch

from fulmen_algorithm.trainers.standings import HandOver, Standing
from fulmen_algorithm.training.parallel import AllReduce
from fulmen_algorithm.training.randomness import OwnRandomness
from fulmen_algorithm.training.settings import StepResult
from fulmen_algorithm.training.state import BatchProgress, TrainingState
from fulmen_algorithm.training.state_files import EXCHANGE, write_state

BATCH = "batch.pt"
GENERATORS = "generators-{rank}.pt"


def standing_of(state: TrainingState) -> Standing:
    """Returns the progress of this rank. With a critic or local steps a copy is not the complete state."""
    complete = state.critic is None and not state.reducer.steps_locally
    return Standing(steps=state.tried_steps, complete=complete)


def write(state: TrainingState, randomness: OwnRandomness, order: HandOver) -> None:
    """Writes this rank's share of the state. The rank cannot train afterwards: only its copy of the weights is left.

    Raises:
        OSError: if the disk is full.
    """
    ranks, copy = state.policy.ranks, state.policy.groups.copy
    exchange = state.reducer.state()
    # A rank that is one step behind has the sum of that step, which the others have taken.
    if state.step_start is not None and state.tried_steps == order.steps:
        exchange, randomness.state = state.step_start.exchange, state.step_start.generators
    if exchange:
        torch.save(exchange, order.folder / EXCHANGE.format(rank=f"{ranks.rank:05d}"))
    torch.save(dict(randomness.state), order.folder / GENERATORS.format(rank=f"{ranks.rank:05d}"))
    if ranks.rank not in order.leaders:
        return
    state.policy.ranks, state.reducer = copy, AllReduce()
    with randomness.in_use():
        write_state(state, order.folder)
    if copy.leads and order.with_batch and state.batch is not None:
        torch.save(asdict(state.batch), order.folder / BATCH)


def read(folder: Path, state: TrainingState, randomness: OwnRandomness) -> BatchProgress | None:
    """Reads what `write` adds to a training state, if a folder has it; returns the batch to continue with."""
    if files := sorted(folder.glob(GENERATORS.format(rank="*"))):
        mine = files[state.policy.ranks.rank % len(files)]
        randomness.state = torch.load(mine, map_location="cpu", weights_only=True)
    if not (folder / BATCH).exists():
        return None
    saved = torch.load(folder / BATCH, map_location="cpu", weights_only=True)
    saved["results"] = [StepResult(**result) for result in saved["results"]]
    return BatchProgress(**saved)
