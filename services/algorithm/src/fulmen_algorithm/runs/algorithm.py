"""The interface of an algorithm, and the settings that all algorithms share."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Generic, Protocol, Self, TypeVar

from pydantic import Field, model_validator

from fulmen_algorithm.losses.advantage_settings import CriticPlan
from fulmen_algorithm.policy.engine_settings import EmbeddedEngine, EngineSettings
from fulmen_algorithm.runs.collapse import CollapseSettings, NoticeCollapse
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.training.compute import ComputeSettings, OneProcess, ParallelSettings, Precision
from fulmen_algorithm.training.defaults import REINFORCEMENT, ModelFacts, RateBySize
from fulmen_algorithm.training.passes import Attention, PassSettings
from fulmen_algorithm.training.settings import AdamW, FullWeights, LoraSettings, Muon, Sgd, UpdateRule, WeightsSettings
from fulmen_algorithm.training.strict import AUTO_BY_NAME, NONE_BY_NAME, Strict
from fulmen_exchange.registry import ExchangeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLimits:
    """Limits of a rollout at the store.

    Attributes:
        timeout_s: Limit of one attempt, in seconds.
        attempts: Attempts of one rollout, where the failure is not the agent's.
        restart_lost: Whether an attempt after a lost one samples everything anew.
    """

    timeout_s: float = 120.0
    attempts: int = 8
    restart_lost: bool = False


PROMPT = "prompt"
"""The input that is passed to all rollouts of a run."""


class RunSettings(Strict):
    """Settings of all runs.

    Attributes:
        steps: Steps of the run.
        seed: Random seed of the run: order of tasks, shuffling, building of the model.
        checkpoint_every: Steps between checkpoints; the last step always has one.
        engine: Engine that serves the policy, such as `{kind = "embedded"}`.
    """

    steps: int = Field(default=100, ge=1, le=1_000_000)
    seed: int = Field(default=0, ge=0, lt=2**31)
    checkpoint_every: int = Field(default=10, ge=1)
    engine: EngineSettings = EmbeddedEngine()

    @property
    def rollout_limits(self) -> RolloutLimits:
        """Limits of the run's rollouts."""
        return RolloutLimits()

    @property
    def endpoints(self) -> dict[str, str]:
        """External addresses called by the run, by the name of the setting with this `base_url`."""
        return {}

    @property
    def exchange_targets(self) -> dict[str, str]:
        """Addresses of exchange servers that the run's ranks use, by the name of the setting of `exchange.link`."""
        return {}

    @property
    def engines_beside(self) -> int:
        """Engines that the run needs besides those of `engine`."""
        return 0

    @property
    def earlier_runs(self) -> dict[str, str]:
        """Ids of runs of the project whose rollouts are read, empty for none, by the name of the setting."""
        return {}

    @property
    def cluster(self) -> str:
        """Name of the cluster on which the run's ranks are; empty without ranks."""
        return ""


def short_warm_up(max_steps: int) -> Callable[[dict[str, Any]], int]:
    """Returns the default of `warmup_steps`: the smaller of `max_steps` and `steps`."""
    return lambda known: min(max_steps, known.get("steps", max_steps))


class AlgorithmSettings(RunSettings):
    """Settings of an algorithm that trains weights.

    Attributes:
        learning_rate: Peak learning rate; `"auto"` chooses it by the size of the model (`training.defaults`).
        optimizer: `{kind = "adamw"}`, `{kind = "muon"}` or `{kind = "sgd"}` with its settings; SGD needs a higher learning rate.
        weight_decay: Decoupled weight decay; not for SGD.
        schedule: `constant`, `linear` or `cosine`, after the warm-up; the latter two end at 0 with the run.
        warmup_steps: Optimiser steps of linear warm-up; at most the steps of the run.
        max_grad_norm: Maximum global norm of the gradients, to which larger ones are scaled down.
        explosion_factor: Ratio of an optimiser step's gradient norm to the median of the last 64 above which the step
            is skipped and counted; `"none"` for no limit.
        collapse: Reaction to a collapsing reward: `{kind = "notice"}` to record a notice, `{kind = "rollback",
            max_rollbacks = 2}` to resume from the best checkpoint, or `{kind = "none"}`.
        token_budget: Maximum number of positions of a micro-batch; affects memory, not the result.
        parallel: Processes that train: `{kind = "none"}` for the service's own, `{kind = "ddp", ranks = 2}` for ranks
            with all weights, `{kind = "fsdp2", ranks = 2}` for ranks with a part of them, `{kind = "fsdp2", ranks = 4,
            shard = 2}` for two copies in two parts each; `cluster` names other machines.
        exchange: Exchange of gradients between ranks of `ddp`, or between copies of `fsdp2`, such as
            `{codec = "dgc", ratio = 100}`; null for uncompressed gradients.
        precision: `fp32` or `bf16`, of the forward and backward passes; `auto` is bf16 on GPUs and fp32 on CPUs.
        gradient_checkpointing: Recomputes the activations of each layer in the backward pass instead of storing them.
        passes: How passes are computed, such as `{attention = "flash_attention_2", compile = true}`.
        write_behind: Continues training while a version is published and a checkpoint is written from a copy in memory. Only in
            the service's own process; for versions, only with algorithms that train on rollouts of older versions.
        weights: Format of published versions: `{kind = "full"}` or `{kind = "delta"}` with its settings.
        lora: Low-rank adapters that are trained instead of all weights; null for all weights.
    """

    default_rate: ClassVar[RateBySize] = REINFORCEMENT
    learning_rate: Annotated[float | None, AUTO_BY_NAME] = Field(default=None, gt=0, le=1)
    optimizer: UpdateRule = AdamW()
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    schedule: str = Field(default="constant", pattern="^(constant|linear|cosine)$")
    warmup_steps: int = Field(default=0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    explosion_factor: Annotated[float | None, NONE_BY_NAME] = Field(default=50.0, gt=1)
    collapse: CollapseSettings = NoticeCollapse()
    token_budget: int = Field(default=8192, ge=16, le=1_048_576)
    parallel: ParallelSettings = OneProcess()
    exchange: ExchangeSettings | None = None
    precision: Precision = Precision.AUTO
    gradient_checkpointing: bool = False
    passes: PassSettings = PassSettings()
    write_behind: bool = False
    weights: WeightsSettings = FullWeights()
    lora: LoraSettings | None = None

    @model_validator(mode="after")
    def _adapters_are_published_whole(self) -> Self:
        if self.lora is not None and self.weights.kind != "full":
            raise ValueError("weights: must be full with lora; adapters have no deltas")
        return self

    @model_validator(mode="after")
    def _one_process_copies_all_weights(self) -> Self:
        if self.write_behind and self.parallel.kind != "none":
            raise ValueError("write_behind: needs parallel.kind none: ranks write their parts together, between steps")
        if self.write_behind and self.lora is not None:
            raise ValueError(
                "write_behind: needs all weights to be trained: adapters are small, and written immediately"
            )
        return self

    @property
    def uses_reference(self) -> bool:
        """Whether the first weights are kept as a frozen reference policy."""
        return False

    @property
    def makes_reward_model(self) -> bool:
        """Whether the published versions are reward models, which score answers."""
        return False

    @property
    def scored_by(self) -> str:
        """Version of the reward model that scores the rollouts of the run, `resources/...`; empty for none."""
        return ""

    @model_validator(mode="after")
    def _models_with_gpus_are_there(self) -> Self:
        there = {"reference": self.uses_reference, "critic": self.critic_plan is not None}
        if missing := [model for model in self.parallel.beside if not there[model]]:
            raise ValueError("; ".join(f"parallel.{model}_gpus: the run has no {model}" for model in missing))
        return self

    @model_validator(mode="after")
    def _adapters_fit_the_ranks(self) -> Self:
        if self.parallel.kind == "fsdp2" and self.lora is not None and len(self.lora.adapters) > 1:
            # Ranks would sum gradients of different adapters with each other.
            raise ValueError("lora.roles: several adapters need parallel.kind none or ddp")
        return self

    @model_validator(mode="after")
    def _optimizer_has_what_is_asked_of_it(self) -> Self:
        if self.weight_decay and isinstance(self.optimizer, Sgd):
            raise ValueError("weight_decay: needs optimizer.kind adamw or muon")
        if isinstance(self.optimizer, Muon) and self.parallel.kind == "fsdp2":
            raise ValueError("optimizer.kind: muon needs whole matrices, parallel.kind none or ddp")
        if isinstance(self.optimizer, Muon) and self.lora is not None:
            raise ValueError("optimizer.kind: muon needs all weights to be trained: adapters are factors of matrices")
        return self

    @model_validator(mode="after")
    def _tensor_fits(self) -> Self:
        if self.parallel.tensor > 1 and (problems := tensor_problems(self)):
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _context_fits(self) -> Self:
        if self.parallel.context > 1 and (problems := context_problems(self)):
            raise ValueError("; ".join(problems))
        return self

    @model_validator(mode="after")
    def _exchange_fits(self) -> Self:
        if self.exchange is not None and (problems := exchange_problems(self)):
            raise ValueError("; ".join(problems))
        return self

    def rate_for(self, parameters: int) -> float:
        """Returns the peak learning rate for a model of so many parameters; 0 if unknown."""
        if self.learning_rate is not None:
            return self.learning_rate
        return self.default_rate.of(parameters, adapters=self.lora is not None)

    def for_model(self, model: ModelFacts) -> Self:
        """Returns the settings with everything chosen that depends on the model."""
        weights = self.weights
        if isinstance(weights, FullWeights) and weights.dtype is None:
            weights = weights.model_copy(update={"dtype": model.published_as})
        return self.model_copy(update={"learning_rate": self.rate_for(model.parameters), "weights": weights})

    def choices(self, model: ModelFacts) -> Sequence[str]:
        """Returns a sentence for each setting of the algorithm itself that `for_model` chooses."""
        return ()

    def doubts(self, model: ModelFacts) -> Sequence[str]:
        """Returns a sentence for each setting of the algorithm itself that seldom works with such a model."""
        return ()

    @property
    def samples(self) -> bool:
        """Whether rollouts are sampled from the policy."""
        return False

    @property
    def cluster(self) -> str:
        """Name of the cluster on which the run's ranks are; empty without ranks."""
        return "" if self.parallel.kind == "none" else self.parallel.cluster

    @property
    def compute(self) -> ComputeSettings:
        """Who trains, and in which precision."""
        return ComputeSettings(
            parallel=self.parallel,
            precision=self.precision,
            gradient_checkpointing=self.gradient_checkpointing,
            passes=self.passes,
        )

    @property
    def exchange_targets(self) -> dict[str, str]:
        """See `RunSettings`."""
        return {} if self.exchange is None else self.exchange.link.addresses

    @property
    def critic_plan(self) -> CriticPlan | None:
        """Settings of a critic that computes the advantages; None without a critic."""
        return None

    @property
    def optimizer_steps_per_step(self) -> int:
        """Maximum number of optimiser steps in one step of the run."""
        return 1

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps of the whole run; the length of the schedule."""
        return self.steps * self.optimizer_steps_per_step

    @model_validator(mode="after")
    def _warm_up_ends_in_the_run(self) -> Self:
        if self.steps and self.warmup_steps > self.optimizer_steps:
            raise ValueError(
                f"warmup_steps: {self.warmup_steps} is more than the {self.optimizer_steps} optimiser steps of the run"
            )
        return self


def tensor_problems(settings: AlgorithmSettings) -> list[str]:
    """Returns what of a run's settings does not go with split matrices."""
    found = []
    if settings.lora is not None:
        found.append("lora: needs parallel.tensor 1: adapters are of whole matrices")
    if isinstance(settings.optimizer, Muon) and settings.parallel.kind == "ddp":
        found.append("optimizer.kind: muon needs whole matrices, parallel.tensor 1")
    if settings.exchange is not None:
        found.append("exchange: needs parallel.tensor 1: codecs support only parts by rows")
    if settings.passes.compile:
        found.append("passes.compile: needs parallel.tensor 1: layers with split matrices are not compiled")
    return found


def context_problems(settings: AlgorithmSettings) -> list[str]:
    """Returns what of a run's settings does not go with rows that are split by positions."""
    found = []
    if settings.exchange is not None:
        found.append("exchange: needs parallel.context 1: ranks that compute the same rows take no steps of their own")
    if settings.passes.compile:
        found.append("passes.compile: needs parallel.context 1: layers that gather keys and values are not compiled")
    if settings.passes.attention in (Attention.FLASH, Attention.FLEX):
        found.append(f"passes.attention: {settings.passes.attention} needs parallel.context 1: choose sdpa or eager")
    return found


def exchange_problems(settings: AlgorithmSettings) -> list[str]:
    """Returns the reasons why the ranks of a run cannot exchange gradients, or would not converge, with its settings."""
    exchange, optimizer = settings.exchange, settings.optimizer
    if exchange is None:
        return []
    found = []
    parallel = settings.parallel
    if parallel.kind == "none":
        found.append("exchange: needs parallel.kind ddp, or fsdp2 with shard: one rank has nothing to exchange")
    if parallel.kind == "fsdp2":
        if parallel.copies == 1:
            found.append(
                "exchange: needs parallel.kind ddp, or fsdp2 with parallel.shard below ranks: within a copy of the weights"
                " gradients are summed inside the backward pass"
            )
        if exchange.link.kind != "torch":
            found.append(
                "exchange.link: must be kind torch with fsdp2: ranks exchange parts, which servers cannot distinguish"
            )
    if parallel.is_elastic and exchange.link.kind != "torch":
        found.append(
            "exchange.link: must be kind torch with parallel.min_ranks: servers wait for the original number of ranks"
        )
    if settings.lora is not None and exchange.has_residual:
        # It would change adapters of roles without rows in the step.
        found.append(f"exchange: {exchange.name} keeps a residual of each step, which does not work with lora")
    every_step = exchange.outer.kind == "every_step"
    if exchange.sgd_only and every_step and not isinstance(optimizer, Sgd):
        found.append(
            f"optimizer: {exchange.name} needs kind sgd and a higher learning rate: its residuals arrive in"
            " bursts, which AdamW's moments treat as noise. qsgd, bf16 and double_quantization work with adamw"
        )
    if exchange.holds_momentum and isinstance(optimizer, Sgd) and optimizer.momentum:
        found.append(f"optimizer.momentum: must be 0, {exchange.name} has the momentum (exchange.momentum)")
    return found


Settings = TypeVar("Settings", bound=RunSettings)


class Algorithm(Protocol):
    """A training algorithm. State that must survive a crash is in the context's progress, not in the object."""

    async def run(self, ctx: RunContext) -> None:
        """Runs from `ctx.progress` to the end.

        Raises:
            Interrupted: if the run was asked to stop.
            RunFailed: if it cannot continue.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmEntry(Generic[Settings]):
    """The registry's entry of an algorithm.

    Attributes:
        name: Name in the settings of a run; 1 to 63 of [a-z0-9_], beginning with a letter.
        settings: Its settings class.
        make: Builds it from its settings.
        needs: Inputs that a run must name.
        takes: Further inputs that a run may name.
        any_of: Further inputs of which a run must name at least one.
        trains: Whether it trains weights, and so has settings of `AlgorithmSettings`. If not, a run loads no model and
            need not name a policy; one that it names is served as it is.
        single_scores: Whether scores are of use to it without a group of rollouts to compare.
    """

    name: str
    settings: type[Settings]
    make: Callable[[Settings], Algorithm]
    needs: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    any_of: tuple[str, ...] = ()
    trains: bool = True
    single_scores: bool = False

    @property
    def inputs(self) -> frozenset[str]:
        """Every input that a run may name; one that runs an agent may give it a prompt."""
        return frozenset({*self.needs, *self.any_of, *self.optional_inputs, "bundle"})

    @property
    def optional_inputs(self) -> tuple[str, ...]:
        """Optional inputs; a prompt is added if the algorithm runs an agent."""
        runs_agent = "agent" in (*self.needs, *self.takes)
        return (*self.takes, PROMPT) if runs_agent and PROMPT not in (*self.needs, *self.takes) else self.takes


@lru_cache(maxsize=4)
def permutation(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Returns the order of `count` items in an epoch: a pure function of its arguments."""
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return tuple(order)


# The entries' settings differ; each entry is consistent in itself.
Registry = Mapping[str, AlgorithmEntry[Any]]
