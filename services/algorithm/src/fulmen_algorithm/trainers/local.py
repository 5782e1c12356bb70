"""Training in this process, called from the thread that owns torch: the service's, or a rank's."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from fulmen_algorithm.losses.advantage_settings import CriticPlan
from fulmen_algorithm.losses.objectives import LossKl
from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.training.compute import ComputeSettings, Fsdp2
from fulmen_algorithm.training.critic import Critic
from fulmen_algorithm.training.files import full_disk_as_storage_failed
from fulmen_algorithm.training.parallel import GradientReducer, join_group, wants_bf16
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.randomness import OwnRandomness
from fulmen_algorithm.training.rows import Row, UnknownRole
from fulmen_algorithm.training.settings import BatchSettings, LoraSettings, StepResult, StepSettings
from fulmen_algorithm.training.state_files import read_state, write_state
from fulmen_algorithm.training.step import TrainingState, logprobs_of, make_state, sft_step, train_batch
from fulmen_algorithm.weights.lora import TargetsUnknown
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights
from fulmen_exchange.ranks import Ranks


class LocalTrainer:
    """Blocking implementation of `policy.trainer.Trainer`; all ranks of a group make the same calls."""

    def __init__(
        self, state: TrainingState, *, randomness: OwnRandomness, reference: PolicyModel | None = None
    ) -> None:
        self._state = state
        self._randomness = randomness
        self._reference = reference

    @classmethod
    def open(cls, setup: TrainerSetup, ranks: Ranks) -> "LocalTrainer":
        """Loads the model and builds a fresh optimiser.

        Raises:
            RunFailed: if the folder holds no model with tokenizer.
        """
        transformers_logging.disable_progress_bar()
        # The same on every rank until the weights are loaded, then one random sequence per rank.
        randomness = OwnRandomness(setup.seed)
        # A sharded model is moved to its device one layer at a time.
        device = "cpu" if isinstance(setup.compute.parallel, Fsdp2) else str(ranks.device)
        with randomness.in_use():
            policy = load_policy(setup.model_dir, device, setup.lora)
        policy.prepare(setup.compute, ranks)
        reference = None
        if setup.reference_dir is not None:
            reference = load_policy(setup.reference_dir, device)
            reference.model.requires_grad_(False)
            reference.prepare(setup.compute, ranks)
        state = make_state(policy, setup.optimizer)
        if setup.exchange is not None and not policy.sharded:
            state.reducer = _open_reducer(setup, policy, ranks)
        if setup.critic is not None:
            state.critic = _load_critic(setup.model_dir, setup.critic, policy, setup.compute)
        if ranks.rank:
            randomness = OwnRandomness(setup.seed + ranks.rank)
        return cls(state, randomness=randomness, reference=reference)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._state.policy.tokenizer

    def train(
        self, rows: Sequence[Row], *, settings: StepSettings, batch: BatchSettings, seed: int, current_version: int
    ) -> list[StepResult]:
        """Takes the optimiser steps of one training step."""
        with _roles_have_adapters(), self._randomness.in_use():
            return train_batch(
                self._state,
                rows,
                settings=settings,
                batch=batch,
                seed=seed,
                current_version=current_version,
                reference=self._reference if isinstance(settings.objective.kl, LossKl) else None,
            )

    def train_supervised(self, rows: Sequence[Row], *, settings: StepSettings) -> StepResult:
        """Takes one supervised step."""
        with _roles_have_adapters(), self._randomness.in_use():
            return sft_step(self._state, rows, settings=settings)

    def logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the log-probability of each token that trains."""
        self._state.reducer.synchronize()
        with _roles_have_adapters():
            return logprobs_of(self._state.policy, rows, settings=settings, trained_only=True)

    def reference_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the same under the frozen reference."""
        if self._reference is None:
            raise AssertionError("the setup named no reference policy")
        return logprobs_of(self._reference, rows, settings=settings, trained_only=True)

    def write_weights(self, folder: Path, order: WeightsOrder) -> WrittenWeights | None:
        """Writes the present weights for engines; only rank 0 writes and gets a result."""
        self._state.reducer.synchronize()
        with full_disk_as_storage_failed(folder):
            return self._state.policy.publish(folder, order)

    def write_state(self, folder: Path) -> None:
        """Writes the complete training state."""
        self._state.reducer.synchronize()
        with self._randomness.in_use(), full_disk_as_storage_failed(folder):
            write_state(self._state, folder)

    def read_state(self, folder: Path) -> None:
        """Restores the state written by `write_state`."""
        with self._randomness.in_use():
            read_state(folder, self._state)


def _open_reducer(setup: TrainerSetup, policy: PolicyModel, ranks: Ranks) -> GradientReducer:
    # Imported late: codecs, their kernels and gRPC take time to import.
    from fulmen_exchange.links.opening import open_link
    from fulmen_exchange.reducer import CodecReducer

    assert setup.exchange is not None
    parameters = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    link = open_link(setup.exchange, parameters=parameters, ranks=ranks, access=setup.server_access)
    rule = setup.optimizer.rule.kind
    return CodecReducer.open(setup.exchange, parameters=parameters, link=link, seed=setup.seed, optimizer=rule)


def _load_critic(folder: Path, plan: CriticPlan, policy: PolicyModel, compute: ComputeSettings) -> Critic:
    ranks = policy.ranks
    bf16 = wants_bf16(compute, ranks.device)
    try:
        return Critic.load(folder, plan, ranks=ranks, pad_token_id=policy.pad_token_id, bf16=bf16)
    except (OSError, ValueError) as error:
        text = f"The model in {folder} gives no critic: transformers has no token classifier of its architecture."
        raise RunFailed(text) from error


@contextmanager
def _roles_have_adapters() -> Iterator[None]:
    """Turns an unknown role into the end of the run."""
    try:
        yield
    except UnknownRole as error:
        raise RunFailed(str(error)) from error


def load_policy(folder: Path, device: str, lora: LoraSettings | None = None) -> PolicyModel:
    try:
        return PolicyModel.load(folder, device=device, lora=lora)
    except TargetsUnknown as error:
        raise RunFailed(str(error)) from error
    except (OSError, ValueError) as error:
        text = f"The folder {folder} holds no complete model (config, weights and tokenizer)."
        raise RunFailed(text) from error


def open_on_rank(
    setup: TrainerSetup, *, rendezvous: Path, device: str, threads: int, deadline_s: float
) -> LocalTrainer:
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
    return LocalTrainer.open(setup, _joined(place, rendezvous, deadline_s))


@cache
def _joined(place: torch.device, rendezvous: Path, deadline_s: float) -> Ranks:
    # A rank joins the group once, however often a trainer is opened on it.
    return join_group(place, rendezvous=rendezvous, deadline_s=deadline_s)
