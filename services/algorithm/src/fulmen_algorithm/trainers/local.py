"""Training in this process, called from the thread that owns torch: the service's, or a rank's."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import structlog
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from fulmen_algorithm.losses.advantage_settings import CriticPlan
from fulmen_algorithm.losses.objectives import LossKl
from fulmen_algorithm.policy.trainer import TrainerSetup
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers import hand_over
from fulmen_algorithm.trainers.devices import Devices
from fulmen_algorithm.trainers.standings import HandOver, Standing
from fulmen_algorithm.training.compute import Fsdp2
from fulmen_algorithm.training.context_parallel import ContextUnsupported
from fulmen_algorithm.training.context_plan import context_folder_problems
from fulmen_algorithm.training.critic import Critic
from fulmen_algorithm.training.files import full_disk_as_storage_failed
from fulmen_algorithm.training.micro_batches import logprobs_of
from fulmen_algorithm.training.parallel import GradientReducer, RankGroups, groups_of, join_group, wants_bf16
from fulmen_algorithm.training.policy import AttentionUnsupported, PolicyModel, SplitUnsupported
from fulmen_algorithm.training.randomness import OwnRandomness
from fulmen_algorithm.training.rows import Row, UnknownRole
from fulmen_algorithm.training.settings import BatchSettings, LoraSettings, Sgd, StepResult, StepSettings
from fulmen_algorithm.training.state import BatchProgress, TrainingState, make_state
from fulmen_algorithm.training.state_files import copy_state, read_state, write_state
from fulmen_algorithm.training.step import sft_step, train_batch
from fulmen_algorithm.training.tensor_plan import folder_problems
from fulmen_algorithm.weights.lora import TargetsUnknown
from fulmen_algorithm.weights.publishing import WeightsOrder, WrittenWeights
from fulmen_exchange.ranks import Ranks
from fulmen_exchange.way_out import WayOut

_log = structlog.get_logger()

Meet = Callable[[], tuple[str, socket.socket | None]]
"""Returns the address where ranks meet, and the socket at which this one waits for them, if it is the first."""


class LocalTrainer:
    """Blocking implementation of `policy.trainer.Trainer`; all ranks of a group make the same calls."""

    def __init__(
        self,
        state: TrainingState,
        *,
        randomness: OwnRandomness,
        reference: PolicyModel | None = None,
        reward_model: PolicyModel | None = None,
    ) -> None:
        self._state = state
        self._randomness = randomness
        self._reference = reference
        self._reward_model = reward_model
        self._is_whole = True
        self._handed_over: BatchProgress | None = None

    @classmethod
    def open(cls, setup: TrainerSetup, ranks: Ranks, devices: Devices | None = None) -> "LocalTrainer":
        """Loads the models and builds a fresh optimiser; by default all are on the ranks' device.

        Raises:
            RunFailed: if the folder holds no model with tokenizer.
        """
        transformers_logging.disable_progress_bar()
        # The same on every rank until the weights are loaded, then one random sequence per rank.
        randomness = OwnRandomness(setup.seed)
        devices = devices or Devices.all_on(str(ranks.device))
        groups = groups_of(ranks, setup.compute.parallel)
        for folder in (setup.model_dir, setup.reward_dir):
            problems: list[str] = []
            if groups.tensor_mesh is not None and folder is not None:
                problems = folder_problems(folder, groups.tensor.world_size)
            if groups.context.group is not None and folder is not None:
                problems = context_folder_problems(folder)
            if problems:
                raise RunFailed(f"The model in {folder} cannot be split over ranks: {'; '.join(problems)}.")
        with randomness.in_use():
            policy = load_policy(setup.model_dir, devices.policy, setup.lora, groups)
        _prepare(policy, setup, ranks)
        if ranks.leads:
            _log.info("trainer_opened", attention=policy.attention, passes=setup.compute.passes.described)
        frozen = replace(ranks, device=torch.device(devices.reference))
        reference, reward_model = (
            None if folder is None else _load_frozen(folder, setup, frozen, groups)
            for folder in (setup.reference_dir, setup.reward_dir)
        )
        if reward_model is not None:
            _check_same_tokens(reward_model, policy)
        state = make_state(policy, setup.optimizer)
        if setup.exchange is not None:
            state.reducer = _open_reducer(setup, policy)
        if setup.critic is not None:
            state.critic = _load_critic(setup, setup.critic, policy, devices.critic)
        if ranks.rank:
            randomness = OwnRandomness(setup.seed + ranks.rank)
        return cls(state, randomness=randomness, reference=reference, reward_model=reward_model)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The model's tokenizer."""
        return self._state.policy.tokenizer

    def train(
        self, rows: Sequence[Row], *, settings: StepSettings, batch: BatchSettings, seed: int, current_version: int
    ) -> list[StepResult]:
        """Takes the optimiser steps of one training step."""
        begun = self._begun()
        with _roles_have_adapters(), self._randomness.in_use():
            return train_batch(
                self._state,
                rows,
                settings=settings,
                batch=batch,
                seed=seed,
                current_version=current_version,
                reference=self._reference if isinstance(settings.objective.kl, LossKl) else None,
                begun=begun,
            )

    def train_supervised(self, rows: Sequence[Row], *, settings: StepSettings) -> StepResult:
        """Takes one supervised step."""
        self._state.batch = begun = self._begun() or BatchProgress()
        with _roles_have_adapters(), self._randomness.in_use():
            if not begun.results:
                begun.results.append(sft_step(self._state, rows, settings=settings))
        return begun.results[0]

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

    def reward_logprobs(self, rows: Sequence[Row], *, settings: StepSettings) -> list[list[float]]:
        """Computes the same under the reward model."""
        if self._reward_model is None:
            raise AssertionError("the setup named no reward model")
        return logprobs_of(self._reward_model, rows, settings=settings, trained_only=True)

    def write_weights(self, folder: Path, order: WeightsOrder) -> WrittenWeights | None:
        """Writes the present weights for engines; only rank 0 writes and gets a result."""
        self._state.reducer.synchronize()
        with full_disk_as_storage_failed(folder):
            return self._state.policy.publish(folder, order)

    def copy_weights(self, order: WeightsOrder) -> Callable[[Path], WrittenWeights]:
        """Copies the present weights of one process; returns what writes them, in any thread."""
        self._state.reducer.synchronize()
        write = self._state.policy.copy_to_publish(order)

        def write_copy(folder: Path) -> WrittenWeights:
            with full_disk_as_storage_failed(folder):
                return write(folder)

        return write_copy

    def copy_state(self) -> Callable[[Path], None]:
        """Copies the training state of one process; returns what writes it, in any thread."""
        self._state.reducer.synchronize()
        with self._randomness.in_use():
            write = copy_state(self._state)

        def write_copy(folder: Path) -> None:
            with full_disk_as_storage_failed(folder):
                write(folder)

        return write_copy

    def write_state(self, folder: Path) -> None:
        """Writes the complete training state."""
        self._state.reducer.synchronize()
        with self._randomness.in_use(), full_disk_as_storage_failed(folder):
            write_state(self._state, folder)

    def read_state(self, folder: Path) -> None:
        """Restores the state written by `write_state`."""
        self._is_whole = False
        with self._randomness.in_use():
            read_state(folder, self._state)
        self._handed_over = hand_over.read(folder, self._state, self._randomness)
        self._is_whole = True

    def leave(self) -> Standing:
        """Reports the progress of this rank, which has left the collectives with lost ranks."""
        found = hand_over.standing_of(self._state)
        return found.model_copy(update={"complete": found.complete and self._is_whole})

    def hand_over(self, order: HandOver) -> None:
        """Writes this rank's share of the state of a group that has lost ranks; it cannot train afterwards."""
        with full_disk_as_storage_failed(order.folder):
            hand_over.write(self._state, self._randomness, order)

    def _begun(self) -> BatchProgress | None:
        """Returns the batch that this call continues with; the next call begins a new one."""
        begun, self._handed_over, self._state.batch = self._handed_over, None, None
        return begun


def _load_frozen(folder: Path, setup: TrainerSetup, ranks: Ranks, groups: RankGroups) -> PolicyModel:
    """Loads a model that does not train, beside the policy."""
    loaded = load_policy(folder, str(ranks.device), groups=groups)
    loaded.model.requires_grad_(False)
    _prepare(loaded, setup, ranks)
    return loaded


def _prepare(policy: PolicyModel, setup: TrainerSetup, ranks: Ranks) -> None:
    try:
        policy.prepare(setup.compute, ranks)
    except (AttentionUnsupported, ContextUnsupported) as error:
        raise RunFailed(str(error)) from error


def _check_same_tokens(reward_model: PolicyModel, policy: PolicyModel) -> None:
    # It reads the tokens that the policy sampled.
    if reward_model.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise RunFailed("The reward model must have the tokenizer of the policy, whose tokens it scores.")


def _open_reducer(setup: TrainerSetup, policy: PolicyModel) -> GradientReducer:
    # Imported late: codecs, their kernels and gRPC take time to import.
    from fulmen_exchange.links.opening import open_link
    from fulmen_exchange.reducer import CodecReducer

    assert setup.exchange is not None
    parameters = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    groups = policy.groups
    link = open_link(setup.exchange, parameters=parameters, ranks=groups.peers, access=setup.server_access)
    # For the exchange all rules but SGD are like AdamW: bursts do them harm.
    rule = "sgd" if isinstance(setup.optimizer.rule, Sgd) else "adamw"
    return CodecReducer.open(
        setup.exchange, parameters=parameters, link=link, seed=setup.seed, optimizer=rule, copy=groups.copy
    )


def _load_critic(setup: TrainerSetup, plan: CriticPlan, policy: PolicyModel, device: str) -> Critic:
    parallel = setup.compute.parallel
    # On GPUs of its own it is whole: the parts of the policy are on others.
    together = policy.groups.copy.group is not None or policy.groups.context.group is not None
    spread = together and parallel.critic_gpus is None
    try:
        return Critic.load(
            setup.model_dir,
            plan,
            ranks=policy.ranks,
            groups=policy.groups if spread else None,
            parallel=parallel if isinstance(parallel, Fsdp2) else None,
            device=device,
            pad_token_id=policy.pad_token_id,
            bf16=wants_bf16(setup.compute, policy.ranks.device),
        )
    except (OSError, ValueError) as error:
        text = f"The model in {setup.model_dir} cannot be used as a critic: transformers has no token classifier for its architecture."
        raise RunFailed(text) from error


@contextmanager
def _roles_have_adapters() -> Iterator[None]:
    """Turns an unknown role into the end of the run."""
    try:
        yield
    except UnknownRole as error:
        raise RunFailed(str(error)) from error


def load_policy(
    folder: Path, device: str, lora: LoraSettings | None = None, groups: RankGroups | None = None
) -> PolicyModel:
    meshes = (groups.mesh, groups.tensor_mesh) if groups is not None else (None, None)
    try:
        return PolicyModel.load(folder, device=device, lora=lora, mesh=meshes[0], tensor_mesh=meshes[1])
    except (TargetsUnknown, SplitUnsupported) as error:
        raise RunFailed(str(error)) from error
    except (OSError, ValueError) as error:
        text = f"The folder {folder} contains no complete model (config, weights and tokenizer)."
        raise RunFailed(text) from error


def open_on_rank(
    setup: TrainerSetup, *, meet: Meet, left: "Future[None]", device: str, threads: int, deadline_s: float
) -> LocalTrainer:
    """Opens a trainer on this rank; `left` is set when other ranks are lost.

    Raises:
        RunFailed: if the folder holds no model with tokenizer, or the machine has fewer GPUs than ranks.
    """
    torch.set_num_threads(threads)
    parallel, devices = setup.compute.parallel, Devices.all_on(device)
    if device == "cuda":
        local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        wanted, there = local_ranks * (1 + len(parallel.beside)), torch.cuda.device_count()
        if wanted > there:
            text = f"The run requests {local_ranks} ranks on {wanted} GPUs, but this machine has {there} GPUs."
            raise RunFailed(text)
        devices = Devices.of_rank(parallel, local_rank, local_ranks)
    place = torch.device(devices.policy)
    ranks = _joined(place, meet, deadline_s, parallel.is_elastic)
    if parallel.is_elastic:
        way_out = WayOut(left, device=place)
        way_out.groups += [ranks.group] if ranks.group is not None else []
        ranks = replace(ranks, way_out=way_out)
    return LocalTrainer.open(setup, ranks, devices)


@cache
def _joined(place: torch.device, meet: Meet, deadline_s: float, is_elastic: bool) -> Ranks:
    # A rank joins the group once, however often a trainer is opened on it.
    rendezvous, listener = meet()
    return join_group(
        place, rendezvous=rendezvous, listener=listener, deadline_s=deadline_s, outlives_others=is_elastic
    )
