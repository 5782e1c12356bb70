"""The training state in a folder: model, optimiser, counters (including the schedule), random generators.

Weights and moments are stored complete and by name, so any number of ranks can resume from the state of any other
number. All ranks call these functions, and rank 0 writes. Invariant: with the same number of ranks, training resumes
bit for bit.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from fulmen_algorithm.training.checkpoints import MODEL, OtherArchitecture
from fulmen_algorithm.training.critic import CRITIC
from fulmen_algorithm.training.optimizer import NormWatch
from fulmen_algorithm.training.randomness import generators, set_generators
from fulmen_algorithm.training.step import TrainingState
from fulmen_algorithm.weights.tensor_files import TensorFileDamaged

TRAINING = "training.pt"
WEIGHTS = "model*.safetensors"
EXCHANGE = "exchange-{rank}.pt"


def write_state(state: TrainingState, folder: Path, *, tokenizer: bool = True) -> None:
    """Writes the complete training state, including the process-wide random generators; also a tokenizer, for engines.

    Raises:
        OSError: if the disk is full.
    """
    # Collectives first: after a disk error on rank 0 no rank may wait for it.
    saved = _training_dict(state)
    state.policy.save(folder / MODEL, tokenizer=tokenizer)
    kept = state.reducer.state()
    if state.reducer.steps_locally:
        kept["moments"] = _get_moments(state, everywhere=True)
    if kept:
        # One file per rank: residuals may be twice as large as the weights.
        torch.save(kept, folder / EXCHANGE.format(rank=f"{state.policy.ranks.rank:05d}"))
    if state.policy.ranks.leads:
        torch.save(saved, folder / TRAINING)
        if state.critic is not None:
            torch.save(state.critic.state(), folder / CRITIC)


def read_state(folder: Path, state: TrainingState) -> None:
    """Restores the state written by `write_state`, in place, and the process-wide random generators.

    Raises:
        OtherArchitecture: if the model or the optimiser has another architecture.
    """
    _read_weights(folder / MODEL, state)
    if state.critic is not None:
        state.critic.restore(torch.load(folder / CRITIC, map_location="cpu", weights_only=True))
    saved = torch.load(folder / TRAINING, map_location="cpu", weights_only=True)
    _set_moments(state, saved["moments"])
    state.optimizer_steps = saved["optimizer_steps"]
    state.skipped_steps = saved["skipped_steps"]
    state.norms = NormWatch(saved["norms"])
    files = sorted(folder.glob(EXCHANGE.format(rank="*")))
    kept = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    own = [one.pop("moments", None) for one in kept]
    if state.reducer.steps_locally and any(own):
        _set_moments(state, own[state.policy.ranks.rank % len(own)])
    state.reducer.restore(kept)
    of_ranks = saved["rng"]
    set_generators(of_ranks[state.policy.ranks.rank % len(of_ranks)])


def _read_weights(folder: Path, state: TrainingState) -> None:
    model = state.policy.model
    if state.policy.adapters is not None:
        try:
            own: dict[str, Any] = dict(state.policy.adapters.read(folder))
        except (TensorFileDamaged, KeyError, OSError) as error:
            raise OtherArchitecture(f"The adapters in {folder} are not those of this run.") from error
        set_model_state_dict(model, own, options=StateDictOptions(full_state_dict=True, strict=False))
        return
    weights: dict[str, Any] = {
        name: value for file in sorted(folder.glob(WEIGHTS)) for name, value in load_file(file).items()
    }
    # Tied weights are in the files once.
    once = {(name, value.shape) for name, value in model.named_parameters()}
    all_names = {(name, value.shape) for name, value in model.state_dict().items()}
    found = {(name, value.shape) for name, value in weights.items()}
    if different := {name for name, _ in (once - found) | (found - all_names)}:
        raise OtherArchitecture(f"The model in {folder} is of another architecture: {sorted(different)[:3]}.")
    set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, strict=False))


def _training_dict(state: TrainingState) -> dict[str, Any]:
    return {
        "moments": _get_moments(state),
        "optimizer_steps": state.optimizer_steps,
        "skipped_steps": state.skipped_steps,
        "norms": state.norms.norms,
        "rng": state.policy.ranks.gather(generators()),
    }


def _get_moments(state: TrainingState, *, everywhere: bool = False) -> dict[str, dict[str, Tensor]]:
    """Gathers the optimiser's moments by weight name, complete, on the CPU of rank 0 or of every rank.

    The library's own function would take a step where it has no moments yet.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for name, parameter in state.policy.model.named_parameters():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            # Gathered one weight at a time, so that no GPU holds all of them.
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if everywhere or state.policy.ranks.leads:
                found.setdefault(name, {})[key] = whole.cpu()
    return found


def _set_moments(state: TrainingState, moments: Mapping[str, Mapping[str, Tensor]]) -> None:
    state.optimizer.state.clear()
    for name, parameter in state.policy.model.named_parameters():
        for key, value in moments.get(name, {}).items():
            if value.shape == parameter.shape and isinstance(parameter, DTensor):
                placed: Tensor = distribute_tensor(
                    value.to(parameter.device), parameter.device_mesh, parameter.placements
                )
            else:
                # The optimiser keeps its step count on the CPU.
                placed = value.to(parameter.device) if value.shape == parameter.shape else value
            state.optimizer.state[parameter][key] = placed.clone()
