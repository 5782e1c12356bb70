"""Compute settings: number of ranks, how they share the work, and precision. Importable without torch."""

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import combinations
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fulmen_algorithm.training.passes import PassSettings
from fulmen_algorithm.training.strict import Strict

MAX_RANKS = 1024
GpuNumber = Annotated[int, Field(ge=0, le=1023)]
"""A GPU of the service's machine."""
THIS_MACHINE = "local"
"""Name of the cluster that is the service's machine."""
OWN = "own"
"""GPUs of a model's own, which the plan chooses."""
OwnGpus = Literal["own"] | Annotated[list[GpuNumber], Field(min_length=1, max_length=MAX_RANKS)]


class Balance(StrEnum):
    """How micro-batches are shared among ranks."""

    POSITIONS = "positions"
    SPEED = "speed"


class BesidePolicy(Strict):
    """Placement of the models beside the policy.

    Attributes:
        reference_gpus: `own` for separate GPUs of the reference, one for each rank, or a list of them on the service's
            machine; null for the GPUs of the policy.
        critic_gpus: The same for the critic.
    """

    reference_gpus: OwnGpus | None = None
    critic_gpus: OwnGpus | None = None

    @property
    def beside(self) -> Mapping[str, OwnGpus]:
        """The models beside the policy that have GPUs of their own, and which."""
        asked = {"reference": self.reference_gpus, "critic": self.critic_gpus}
        return {model: gpus for model, gpus in asked.items() if gpus is not None}


class OneProcess(BesidePolicy):
    """Training is done by the service's own process.

    Attributes:
        gpus: A list with the one GPU on which it trains; null for a GPU that no engine uses, if there are enough.
    """

    kind: Literal["none"] = "none"
    gpus: Annotated[list[GpuNumber], Field(min_length=1, max_length=1)] | None = None

    @model_validator(mode="after")
    def _models_beside_fit(self) -> Self:
        _raise_joined(_list_problems(self))
        return self

    @property
    def ranks(self) -> int:
        """Number of processes: 1."""
        return 1

    @property
    def is_elastic(self) -> bool:
        """One process is always all of them."""
        return False

    @property
    def ranks_per_copy(self) -> int:
        """One process holds all weights."""
        return 1

    @property
    def tensor(self) -> int:
        """One process has all of every matrix."""
        return 1

    @property
    def context(self) -> int:
        """One process computes all positions."""
        return 1

    @property
    def balance(self) -> Balance:
        """One process has no others to share with."""
        return Balance.POSITIONS


class Placed(BesidePolicy):
    """Where the ranks of a run are placed, and how they share its work.

    Attributes:
        ranks: Number of processes; on GPUs, one per GPU.
        min_ranks: Minimum number of processes with which the run continues when a machine is lost, until there are resources
            for all again; null for `ranks`: the run then waits for all of them and resumes from its newest checkpoint. With `fsdp2`
            a multiple of `shard`.
        cluster: Cluster on which they run, as configured by the operator; `local` is the service's machine.
        affinity: `pack` uses few machines, `spread` many, `one_node` a single one, `own_nodes` one per process.
        cpus: CPUs that each needs; 0 for any.
        memory_gib: Memory that each needs, in GiB; 0 for any.
        gpus: List of GPUs of the service's machine, one for each rank; null for GPUs that no engine uses, if there are enough.
        tensor: Ranks that compute the same rows together, each with a part of the matrices of every layer; 1 for none. It
            needs a model for which transformers has a plan, and a number of heads that is divisible by it.
        context: Ranks that compute the same rows together, each a part of the positions, so that long rows fit; 1 for none. With
            `fsdp2` it divides `shard`. Positions must meet in attention alone.
        balance: `positions` gives each rank the same amount of work, and a resumed run is bitwise identical; `speed`
            gives less to ranks that were slower in earlier steps. The ranks of a copy of `fsdp2` count as one.
    """

    ranks: int = Field(default=2, ge=1, le=MAX_RANKS)
    min_ranks: int | None = Field(default=None, ge=1, le=MAX_RANKS)
    cluster: str = Field(default=THIS_MACHINE, pattern="^[a-z0-9-]{1,32}$")
    affinity: Literal["pack", "spread", "one_node", "own_nodes"] = "pack"
    cpus: int = Field(default=0, ge=0, le=4096)
    memory_gib: int = Field(default=0, ge=0, le=65_536)
    gpus: Annotated[list[GpuNumber], Field(min_length=1, max_length=MAX_RANKS)] | None = None
    tensor: int = Field(default=1, ge=1, le=MAX_RANKS)
    context: int = Field(default=1, ge=1, le=MAX_RANKS)
    balance: Annotated[Balance, Field(strict=False)] = Balance.POSITIONS

    @model_validator(mode="after")
    def _tensor_fits(self) -> Self:
        if self.tensor > 1:
            _raise_joined(self._tensor_problems())
        return self

    def _tensor_problems(self) -> Iterable[str]:
        if self.ranks % self.tensor:
            yield f"ranks: {self.ranks} must be a multiple of tensor, {self.tensor}"
        if self.is_elastic:
            yield "min_ranks: needs tensor 1: ranks that are left have no whole matrices"
        if self.balance is Balance.SPEED:
            yield "balance: must be positions with tensor: ranks that compute the same rows have the same speed"
        for model in self.beside:
            yield f"{model}_gpus: needs tensor 1: with more, the {model} is split like the policy"

    @model_validator(mode="after")
    def _context_fits(self) -> Self:
        if self.context > 1:
            _raise_joined(self._context_problems())
        return self

    def _context_problems(self) -> Iterable[str]:
        if self.ranks % self.context:
            yield f"ranks: {self.ranks} must be a multiple of context, {self.context}"
        if self.tensor > 1:
            yield "tensor: needs context 1: rows are split by positions, or matrices"
        if self.is_elastic:
            yield "min_ranks: needs context 1: ranks that are left have no whole rows"
        if self.balance is Balance.SPEED:
            yield "balance: must be positions with context: ranks that compute the same rows have one speed"
        for model in self.beside:
            yield f"{model}_gpus: needs context 1: rows of the {model} are split as the policy's are"

    @model_validator(mode="after")
    def _gpus_fit(self) -> Self:
        if self.gpus is not None and self.cluster != THIS_MACHINE:
            raise ValueError("gpus: names GPUs of the service's machine; a cluster assigns each rank a GPU itself")
        if self.gpus is not None and len(self.gpus) != self.ranks:
            raise ValueError(f"gpus: has {len(self.gpus)} for {self.ranks} ranks; each has one")
        return self

    @model_validator(mode="after")
    def _models_beside_fit(self) -> Self:
        if self.cluster == THIS_MACHINE:
            _raise_joined(_list_problems(self))
        else:
            _raise_joined(
                f"{model}_gpus: names GPUs of the service's machine; on a cluster it is {OWN!r}"
                for model, gpus in self.beside.items()
                if gpus != OWN
            )
        return self

    @model_validator(mode="after")
    def _fewest_are_no_more_than_all(self) -> Self:
        if self.min_ranks is not None and self.min_ranks > self.ranks:
            raise ValueError(f"min_ranks: {self.min_ranks} is more than ranks, {self.ranks}")
        return self

    @property
    def is_elastic(self) -> bool:
        """Whether the number of ranks follows what there is room for."""
        return self.min_ranks is not None

    @property
    def ranks_per_copy(self) -> int:
        """Ranks over which one copy of the weights is spread."""
        return self.tensor


class Ddp(Placed):
    """Every rank, or every `tensor` of them, holds all weights and computes a part of each step; gradients are summed once per step."""

    kind: Literal["ddp"] = "ddp"


class Fsdp2(Placed):
    """Every rank holds a part of the weights, the gradients and the optimiser state.

    Attributes:
        shard: Ranks over which one copy of the weights is spread, such as those of a node; null for all. Fewer than `ranks` make
            ranks / shard copies, whose gradients are summed once per step.
        reshard_after_forward: Frees the gathered weights of a layer between its forward and its backward pass: less
            memory, one more all-gather.

    Source: fully sharded data parallel, arXiv:2304.11277; `torch.distributed.fsdp.fully_shard`.
    """

    kind: Literal["fsdp2"] = "fsdp2"
    shard: int | None = Field(default=None, ge=1, le=MAX_RANKS)
    reshard_after_forward: bool = True

    @model_validator(mode="after")
    def _reference_is_with_the_policy(self) -> Self:
        if self.reference_gpus is not None:
            raise ValueError(
                "reference_gpus: needs kind none or ddp: with other kinds the reference is split like the policy"
            )
        return self

    @model_validator(mode="after")
    def _copies_are_whole(self) -> Self:
        if self.ranks % self.ranks_per_copy:
            raise ValueError(
                f"ranks: {self.ranks} must be a multiple of shard, {self.shard}: every copy of the weights has the same number of ranks"
            )
        if self.min_ranks is not None and self.min_ranks % self.ranks_per_copy:
            raise ValueError(
                f"min_ranks: {self.min_ranks} must be a multiple of shard, {self.ranks_per_copy}: copies of the weights are whole"
            )
        return self

    def _tensor_problems(self) -> Iterable[str]:
        yield from super()._tensor_problems()
        if self.ranks_per_copy % self.tensor or self.ranks_per_copy == self.tensor:
            yield (
                f"tensor: {self.tensor} must divide shard, {self.ranks_per_copy}, and be less: it uses a part of the "
                "ranks of a copy. Without sharding, use kind ddp"
            )

    def _context_problems(self) -> Iterable[str]:
        yield from super()._context_problems()
        if self.ranks_per_copy % self.context:
            yield f"context: {self.context} must divide shard, {self.ranks_per_copy}: its ranks are some of those of a copy"

    @property
    def ranks_per_copy(self) -> int:
        """Ranks over which one copy of the weights is spread."""
        return self.shard or self.ranks

    @property
    def copies(self) -> int:
        """Copies of the weights."""
        return self.ranks // self.ranks_per_copy


ParallelSettings = Annotated[OneProcess | Ddp | Fsdp2, Field(discriminator="kind")]


def shown_gpus(parallel: OneProcess | Placed) -> Sequence[int]:
    """Returns the GPUs of the service's machine that trainers see, in the order of `devices`; none if none are named."""
    named = [parallel.gpus or (), *(gpus for gpus in parallel.beside.values() if isinstance(gpus, list))]
    return [gpu for gpus in named for gpu in gpus]


def _list_problems(parallel: OneProcess | Placed) -> list[str]:
    """Returns why lists of GPUs do not fit the ranks or each other."""
    listed = {f"{model}_gpus": gpus for model, gpus in parallel.beside.items() if isinstance(gpus, list)}
    problems = [
        f"{name}: has {len(gpus)} for {parallel.ranks} ranks; each has one"
        for name, gpus in listed.items()
        if len(gpus) != parallel.ranks
    ]
    for (name, gpus), (other, theirs) in combinations({"gpus": parallel.gpus or [], **listed}.items(), 2):
        if both := sorted({*gpus} & {*theirs}):
            problems.append(f"{other}: GPU {both[0]} is in {name}, too, and would not be its own")
    return problems


def _raise_joined(problems: Iterable[str]) -> None:
    if text := "; ".join(problems):
        raise ValueError(text)


class Precision(StrEnum):
    """Precision of forward and backward passes; weights, moments and log-probabilities are always float32."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"


class ComputeSettings(Strict):
    """Processes and precision of training; results are equal up to rounding.

    Attributes:
        parallel: One process, or a group of ranks.
        precision: `auto` is bf16 on GPUs and fp32 on CPUs.
        gradient_checkpointing: Recomputes the activations of each layer in the backward pass instead of storing them.
        passes: Attention, compilation, offloading.
    """

    parallel: ParallelSettings = OneProcess()
    precision: Annotated[Precision, Field(strict=False)] = Precision.AUTO
    gradient_checkpointing: bool = False
    passes: PassSettings = PassSettings()
