"""How a rank meets the others and opens its part of the trainer."""

import os
from functools import cache

import torch

from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.local import LocalTrainer
from fulmen_algorithm.training.parallel import join_group
from fulmen_exchange.ranks import Ranks


def open_on_rank(setup: TrainerSetup, *, device: str, threads: int, deadline_s: float) -> LocalTrainer:
    """Opens a trainer on this rank.

    Raises:
        RunFailed: if the folder holds no model with tokenizer, or the machine has fewer GPUs than ranks.
    """
    torch.set_num_threads(threads)
    place = torch.device(device)
    if place.type == "cuda":
        wanted, there = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
        if wanted > there:
            raise RunFailed(f"The run asks for {wanted} ranks, and this machine has {there} GPUs.")
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    return LocalTrainer.open(setup, _joined(place, deadline_s))


@cache
def _joined(place: torch.device, deadline_s: float) -> Ranks:
    # A rank meets the others once, however often a trainer is opened on it.
    return join_group(place, deadline_s=deadline_s)
