"""The training state in a folder: model, optimiser, counters (including the schedule), random generators.

`model` is an ordinary model folder, written tensor by tensor. Moments are in parts (`torch.distributed.checkpoint`): safetensors, one file
for each rank that has anything to write, with the place of each part in its tensor in the header. Both are read by any number of
ranks, each its part, and nothing is unpickled; all ranks call these functions. Invariant: with the same number of ranks and copies
of the weights, training resumes bit for bit.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fulmen_algorithm.training.critic import Critic
from fulmen_algorithm.training.files import MODEL, OtherArchitecture
from fulmen_algorithm.training.optimizer import NormWatch
from fulmen_algorithm.training.part_loading import part_like
from fulmen_algorithm.training.randomness import generators, set_generators
from fulmen_algorithm.training.state import TrainingState
from fulmen_algorithm.weights.sources import copies_of
from fulmen_algorithm.weights.tensor_files import TensorFileDamaged, read_layout
from fulmen_algorithm.weights.torch_tensors import published_tensors

FORMAT = 2
TRAINING = "training.pt"
EXCHANGE = "exchange-{rank}.pt"
MOMENTS = "moments-{copy}"
CRITIC = "critic.pt"
CRITIC_PARTS = "critic"
WEIGHTS = "weights"
"""Folder of the critic's weights, beside those of its moments."""


class UnknownFormat(ValueError):
    """A training state is of another release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """What is written of a training state.

    Attributes:
        counters: What is not of the weights' size.
        moments: Moments by kind and weight.
        exchange: State of the exchange of gradients.
        critic: Counters of the critic; empty without one.
        critic_tensors: Its weights and moments, by kind and weight.
        weights: Copies of the weights; None for the present ones.
    """

    counters: Mapping[str, Any]
    moments: Mapping[str, Mapping[str, Tensor]]
    exchange: Mapping[str, Any]
    critic: Mapping[str, Any]
    critic_tensors: Mapping[str, Mapping[str, Tensor]]
    weights: Mapping[str, Tensor] | None = None


def write_state(state: TrainingState, folder: Path, *, tokenizer: bool = True) -> None:
    """Writes the complete training state, including the process-wide random generators; also a tokenizer, for engines.

    Raises:
        OSError: if the disk is full.
    """
    _write(state, _captured(state), folder, tokenizer=tokenizer)


def copy_state(state: TrainingState) -> Callable[[Path], None]:
    """Copies the complete training state of one process that trains all weights.

    Returns:
        A function that writes it to a folder, in any thread, while the training continues; see `write_state`.
    """
    present = _captured(state)
    copy = replace(
        present,
        moments={kind: copies_of(tensors) for kind, tensors in present.moments.items()},
        exchange=deepcopy(present.exchange),
        critic=deepcopy(present.critic),
        critic_tensors={kind: copies_of(tensors) for kind, tensors in present.critic_tensors.items()},
        weights=copies_of(published_tensors(state.policy.model)),
    )
    return partial(_write, state, copy)


def _captured(state: TrainingState) -> _Captured:
    moments, counts = _moments(state.policy.model, state.optimizer)
    counters = {
        "format": FORMAT,
        "moments": {key: sorted(tensors) for key, tensors in moments.items()},
        "counts": counts,
        "optimizer_steps": state.optimizer_steps,
        "skipped_steps": state.skipped_steps,
        "norms": state.norms.norms,
        "rng": state.policy.ranks.gather(generators()),
    }
    critic: dict[str, Any] = {}
    critic_tensors: dict[str, dict[str, Tensor]] = {}
    if state.critic is not None:
        critic_tensors, critic_counts = _moments(state.critic.model, state.critic.optimizer)
        moments_of_critic = {key: sorted(tensors) for key, tensors in critic_tensors.items()}
        critic = {"moments": moments_of_critic, "counts": critic_counts, "norms": state.critic.norms}
        critic_tensors[WEIGHTS] = dict(state.critic.model.state_dict())
    return _Captured(
        counters=counters,
        moments=moments,
        exchange=state.reducer.state(),
        critic=critic,
        critic_tensors=critic_tensors,
    )


def _write(state: TrainingState, captured: _Captured, folder: Path, *, tokenizer: bool = True) -> None:
    ranks, groups = state.policy.ranks, state.policy.groups
    failed: Exception | None = None
    try:
        state.policy.save(folder / MODEL, tokenizer=tokenizer, weights=captured.weights)
    except Exception as error:  # noqa: BLE001  (raised below)
        failed = error
    # Otherwise the others would wait for a rank with a full disk.
    if any(ranks.gather(failed is not None)):
        if failed is not None:
            raise failed
        return
    # Copies have the same moments, unless each takes steps of its own.
    own = state.reducer.steps_locally
    writers = groups.copy if own else ranks
    place = folder / MOMENTS.format(copy=f"{groups.peers.rank if own else 0:05d}")
    for key, tensors in captured.moments.items():
        # One kind at a time: the library has what it writes in memory twice.
        writers.run(partial(write_parts, tensors, place / key, writers.group))
    for key, tensors in captured.critic_tensors.items():
        ranks.run(partial(write_parts, tensors, folder / CRITIC_PARTS / key, ranks.group))
    # After the last exchange: a rank that cannot write keeps no other waiting.
    if captured.exchange:
        # One file per rank: residuals may be twice as large as the weights.
        torch.save(captured.exchange, folder / EXCHANGE.format(rank=f"{ranks.rank:05d}"))
    if ranks.leads:
        torch.save(captured.counters, folder / TRAINING)
        if captured.critic:
            torch.save(captured.critic, folder / CRITIC)


def read_state(folder: Path, state: TrainingState) -> None:
    """Restores the state written by `write_state`, in place, and the process-wide random generators.

    Raises:
        OtherArchitecture: if the model or the optimiser has another architecture.
        UnknownFormat: if another release wrote it.
    """
    saved = _read_counters(folder)
    _read_weights(folder / MODEL, state)
    if state.critic is not None:
        _read_critic(folder, state.critic)
    _read_policys_moments(folder, state, saved)
    state.optimizer_steps = saved["optimizer_steps"]
    state.skipped_steps = saved["skipped_steps"]
    state.norms = NormWatch(saved["norms"])
    # Mapped, not read: a rank needs little of what others have stored.
    files = sorted(folder.glob(EXCHANGE.format(rank="*")))
    state.reducer.restore([torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files])
    of_ranks = saved["rng"]
    set_generators(of_ranks[state.policy.ranks.rank % len(of_ranks)])


def _read_counters(folder: Path) -> dict[str, Any]:
    """Reads what is not of the weights' size."""
    if not (folder / TRAINING).exists():
        raise OtherArchitecture(f"There is no training state in {folder}.")
    saved: dict[str, Any] = torch.load(folder / TRAINING, map_location="cpu", weights_only=True)
    if saved.get("format") != FORMAT:
        raise UnknownFormat(
            f"The training state in {folder} has format {saved.get('format', 1)}; this release reads format {FORMAT}."
        )
    return saved


def _read_weights(folder: Path, state: TrainingState) -> None:
    model = state.policy.model
    if state.policy.adapters is not None:
        try:
            own: dict[str, Any] = dict(state.policy.adapters.read(folder))
        except (TensorFileDamaged, KeyError, OSError) as error:
            raise OtherArchitecture(f"The adapters in {folder} do not belong to this run.") from error
        set_model_state_dict(model, own, options=StateDictOptions(full_state_dict=True, strict=False))
        return
    if not state.policy.by_name:
        try:
            state.policy.read_converted(folder)
        except (ValueError, RuntimeError) as error:
            raise OtherArchitecture(f"The model in {folder} has another architecture.") from error
        return
    try:
        found = {(name, shape) for name, (_, shape) in read_layout(folder).items()}
    except TensorFileDamaged as error:
        raise OtherArchitecture(f"The model in {folder} cannot be read: {error}") from error
    # Tied weights are in the files once.
    once = {(name, tuple(value.shape)) for name, value in model.named_parameters()}
    present = {(name, tuple(value.shape)): value for name, value in model.state_dict(keep_vars=True).items()}
    if different := {name for name, _ in (once - found) | (found - present.keys())}:
        raise OtherArchitecture(f"The model in {folder} has another architecture: {sorted(different)[:3]}.")
    with torch.no_grad():
        read_parts({name: present[name, shape] for name, shape in found}, folder, state.policy.groups.copy.group)


def _read_critic(folder: Path, critic: Critic) -> None:
    saved: dict[str, Any] = torch.load(folder / CRITIC, map_location="cpu", weights_only=True)
    group, parts = critic.groups.copy.group, folder / CRITIC_PARTS
    if "model" in saved:
        _take_critic_of_one_file(saved, critic)
        return
    with torch.no_grad():
        read_parts(critic.model.state_dict(), parts / WEIGHTS, group)
    _read_moments(saved, critic.model, critic.optimizer, parts, group)
    critic.norms = saved["norms"]


def _take_critic_of_one_file(saved: Mapping[str, Any], critic: Critic) -> None:
    """Restores what releases before the critic was in parts have stored: all of it in one file, moments by number."""
    own, optimizer = critic.model.state_dict(), critic.optimizer
    with torch.no_grad():
        for name, tensor in saved["model"].items():
            own[name].copy_(part_like(tensor, own[name]))
    optimizer.state.clear()
    for parameter, found in zip(critic.model.parameters(), saved["optimizer"]["state"].values(), strict=False):
        optimizer.state[parameter].update(
            {key: part_like(value, parameter) if value.ndim else value for key, value in found.items()}
        )
    critic.norms = saved["norms"]


def _moments(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
    """Returns the optimiser's moments by kind and weight, as this rank holds them, and its counts by weight.

    The library's own function would take a step where it has no moments yet.
    """
    moments: dict[str, dict[str, Tensor]] = {}
    counts: dict[str, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if value.shape == parameter.shape:
                moments.setdefault(key, {})[name] = value
            else:
                counts.setdefault(name, {})[key] = value.detach().cpu().clone()
    return moments, counts


def _read_policys_moments(folder: Path, state: TrainingState, saved: Mapping[str, Any]) -> None:
    groups, copies = state.policy.groups, sorted(folder.glob(MOMENTS.format(copy="*")))
    place = copies[groups.peers.rank % len(copies) if state.reducer.steps_locally else 0] if copies else folder
    _read_moments(saved, state.policy.model, state.optimizer, place, groups.copy.group)


def _read_moments(
    saved: Mapping[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    place: Path,
    group: dist.ProcessGroup | None,
) -> None:
    parameters = dict(model.named_parameters())
    optimizer.state.clear()
    for name, counts in saved["counts"].items():
        # The optimiser keeps its step count on the CPU, but a fused one with the weights.
        device = parameters[name].device if optimizer.defaults.get("fused") else "cpu"
        optimizer.state[parameters[name]].update({k: value.to(device, copy=True) for k, value in counts.items()})
    for key, names in saved["moments"].items():
        moments = {name: torch.zeros_like(parameters[name], requires_grad=False) for name in names}
        read_parts(moments, place / key, group)
        for name, value in moments.items():
            optimizer.state[parameters[name]][key] = value


def write_parts(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Writes this rank's parts of distributed tensors; each part, and each tensor that all ranks have, is written once.

    Args:
        tensors: The same names on every rank.
        folder: Created.
        group: Ranks that call this together; None for one process alone.

    Raises:
        OSError: on every rank, if one cannot write.
    """
    with _own_errors():
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)


def read_parts(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Reads tensors in place, each rank what it holds; files may hold whole tensors or parts. See `write_parts`."""
    with _own_errors():
        reader = HuggingFaceStorageReader(str(folder))
        load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raises the error of the first rank that failed instead of the library's own, which no caller expects."""
    try:
        with warnings.catch_warnings():
            # It reports that one process is alone.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        _, (first, _) = min(error.failures.items())
        raise first from error
