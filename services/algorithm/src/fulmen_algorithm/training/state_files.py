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
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from fulmen_algorithm.training.critic import CRITIC
from fulmen_algorithm.training.files import MODEL, OtherArchitecture
from fulmen_algorithm.training.optimizer import NormWatch
from fulmen_algorithm.training.randomness import generators, set_generators
from fulmen_algorithm.training.step import TrainingState
from fulmen_algorithm.weights.sources import copies_of
from fulmen_algorithm.weights.tensor_files import TensorFileDamaged, read_layout
from fulmen_algorithm.weights.torch_tensors import published_tensors

FORMAT = 2
TRAINING = "training.pt"
EXCHANGE = "exchange-{rank}.pt"
MOMENTS = "moments-{copy}"


class UnknownFormat(ValueError):
    """A training state is of another release."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Captured:
    """What is written of a training state.

    Attributes:
        counters: What is not of the weights' size.
        moments: Moments by kind and weight.
        exchange: State of the exchange of gradients.
        critic: State of the critic; empty without one.
        weights: Copies of the weights; None for the present ones.
    """

    counters: Mapping[str, Any]
    moments: Mapping[str, Mapping[str, Tensor]]
    exchange: Mapping[str, Any]
    critic: Mapping[str, Any]
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
        What writes it to a folder, in any thread, while the training goes on; see `write_state`.
    """
    present = _captured(state)
    copy = replace(
        present,
        moments={kind: copies_of(tensors) for kind, tensors in present.moments.items()},
        exchange=deepcopy(present.exchange),
        critic=deepcopy(present.critic),
        weights=copies_of(published_tensors(state.policy.model)),
    )
    return partial(_write, state, copy)


def _captured(state: TrainingState) -> _Captured:
    moments, counts = _moments(state)
    counters = {
        "format": FORMAT,
        "moments": {key: sorted(tensors) for key, tensors in moments.items()},
        "counts": counts,
        "optimizer_steps": state.optimizer_steps,
        "skipped_steps": state.skipped_steps,
        "norms": state.norms.norms,
        "rng": state.policy.ranks.gather(generators()),
    }
    critic = {} if state.critic is None else state.critic.state()
    return _Captured(counters=counters, moments=moments, exchange=state.reducer.state(), critic=critic)


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
        state.critic.restore(torch.load(folder / CRITIC, map_location="cpu", weights_only=True))
    _read_moments(folder, state, saved)
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
            raise OtherArchitecture(f"The adapters in {folder} are not those of this run.") from error
        set_model_state_dict(model, own, options=StateDictOptions(full_state_dict=True, strict=False))
        return
    if not state.policy.by_name:
        try:
            state.policy.read_converted(folder)
        except (ValueError, RuntimeError) as error:
            raise OtherArchitecture(f"The model in {folder} is of another architecture.") from error
        return
    try:
        found = {(name, shape) for name, (_, shape) in read_layout(folder).items()}
    except TensorFileDamaged as error:
        raise OtherArchitecture(f"The model in {folder} cannot be read: {error}") from error
    # Tied weights are in the files once.
    once = {(name, tuple(value.shape)) for name, value in model.named_parameters()}
    present = {(name, tuple(value.shape)): value for name, value in model.state_dict(keep_vars=True).items()}
    if different := {name for name, _ in (once - found) | (found - present.keys())}:
        raise OtherArchitecture(f"The model in {folder} is of another architecture: {sorted(different)[:3]}.")
    with torch.no_grad():
        read_parts({name: present[name, shape] for name, shape in found}, folder, state.policy.groups.copy.group)


def _moments(state: TrainingState) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
    """Returns the optimiser's moments by kind and weight, as this rank holds them, and its counts by weight.

    The library's own function would take a step where it has no moments yet.
    """
    moments: dict[str, dict[str, Tensor]] = {}
    counts: dict[str, dict[str, Tensor]] = {}
    for name, parameter in state.policy.model.named_parameters():
        for key, value in state.optimizer.state.get(parameter, {}).items():
            if value.shape == parameter.shape:
                moments.setdefault(key, {})[name] = value
            else:
                counts.setdefault(name, {})[key] = value.detach().cpu().clone()
    return moments, counts


def _read_moments(folder: Path, state: TrainingState, saved: Mapping[str, Any]) -> None:
    groups, parameters = state.policy.groups, dict(state.policy.model.named_parameters())
    copies = sorted(folder.glob(MOMENTS.format(copy="*")))
    state.optimizer.state.clear()
    for name, counts in saved["counts"].items():
        # The optimiser keeps its step count on the CPU, but a fused one with the weights.
        place = parameters[name].device if state.optimizer.defaults.get("fused") else "cpu"
        state.optimizer.state[parameters[name]].update({k: value.to(place, copy=True) for k, value in counts.items()})
    for key, names in saved["moments"].items():
        moments = {name: torch.zeros_like(parameters[name], requires_grad=False) for name in names}
        place = copies[groups.peers.rank % len(copies)] if state.reducer.steps_locally else copies[0]
        read_parts(moments, place / key, groups.copy.group)
        for name, value in moments.items():
            state.optimizer.state[parameters[name]][key] = value


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
            # It says that one process is alone.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield
    except CheckpointException as error:
        _, (first, _) = min(error.failures.items())
        raise first from error
