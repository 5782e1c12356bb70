"""Settings of the engine that serves the policy of a run, such as `engine = { kind = "vllm", max_model_len = 4096 }`.

Unknown keys are errors, and so are options of vLLM that Fulmen sets itself.
"""

import re
from enum import StrEnum
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from fulmen_algorithm.training.compute import THIS_MACHINE, GpuNumber
from fulmen_algorithm.training.strict import Strict

OPTION = re.compile(r"^[a-z][a-z0-9-]*$")
MAX_OPTIONS = 50
MAX_OPTION_LENGTH = 1000
MAX_REPLICAS = 64
MAX_GPUS = 1024

SET_BY_FULMEN = frozenset(
    {
        "api-key",
        "api-server-count",
        "config",
        "dtype",
        "enable-lora",
        "enable-return-routed-experts",
        "enforce-eager",
        "gpu-memory-utilization",
        "headless",
        "host",
        "logprobs-mode",
        "max-lora-rank",
        "max-loras",
        "max-model-len",
        "max-num-seqs",
        "middleware",
        "model",
        "port",
        "root-path",
        "served-model-name",
        "ssl-certfile",
        "ssl-keyfile",
        "tensor-parallel-size",
        "tokenizer",
        "tool-call-parser",
        "uds",
        "worker-extension-cls",
    }
)
"""Options of `vllm serve` that a run may not set in `args`: they have separate settings, or Fulmen sets them."""
SET_FOR_NODES = frozenset({"distributed-executor-backend", "pipeline-parallel-size"})


class SwapMode(StrEnum):
    """How calls in flight are treated when the weights are replaced."""

    FREEZE = "freeze"
    DRAIN = "drain"


def _checked_options(args: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
    for name, value in args.items():
        if not OPTION.fullmatch(name):
            raise ValueError(f"{name!r} is not the name of an option, such as max-num-batched-tokens")
        if name.removeprefix("no-") in SET_BY_FULMEN:
            raise ValueError(f"{name} is set by Fulmen, or by a separate setting")
        if isinstance(value, str) and not 0 < len(value) <= MAX_OPTION_LENGTH:
            raise ValueError(f"{name} needs 1 to {MAX_OPTION_LENGTH} characters")
    return args


def _checked_address(base_url: str) -> str:
    parts = urlsplit(base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment or parts.username:
        raise ValueError("must be an address such as http://10.0.0.7:8000/v1")
    return base_url.rstrip("/")


Options = Annotated[
    dict[str, str | int | float | bool], AfterValidator(_checked_options), Field(max_length=MAX_OPTIONS)
]
Replicas = Annotated[int, Field(ge=1, le=MAX_REPLICAS)]
Gpus = (
    Annotated[int, Field(ge=0, le=1024)] | Annotated[list[GpuNumber], Field(min_length=1, max_length=MAX_GPUS)] | None
)
Address = Annotated[str, AfterValidator(_checked_address), Field(max_length=2048)]


class StartedEngine(Strict):
    """What all engines that Fulmen starts have in common."""

    replicas: Replicas = 1
    cluster: str = Field(default=THIS_MACHINE, pattern="^[a-z0-9-]{1,32}$")
    gpus: Gpus = None
    router_replay: bool = False

    @property
    def least_gpus(self) -> int:
        """GPUs that each engine needs on a machine that has any."""
        return 1

    @property
    def gpus_of_each(self) -> int:
        """GPUs of each engine, on each of its machines."""
        if isinstance(self.gpus, list):
            return len(self.gpus) // self.replicas
        return self.least_gpus if self.gpus is None else self.gpus

    @model_validator(mode="after")
    def _gpus_fit(self) -> Self:
        if isinstance(self.gpus, list):
            if self.cluster != THIS_MACHINE:
                raise ValueError(
                    "gpus: a list names GPUs of the service's machine; on a cluster it is the number of each engine"
                )
            if len(self.gpus) % self.replicas:
                raise ValueError(f"gpus: {len(self.gpus)} must be a multiple of replicas, {self.replicas}")
        if self.gpus and self.gpus_of_each < self.least_gpus:
            raise ValueError(f"gpus: each engine needs {self.least_gpus} and would have {self.gpus_of_each}")
        return self


class EmbeddedEngine(StartedEngine):
    """Fulmen's own engine, based on `transformers`, for small models, demos and tests.

    Attributes:
        kind: `embedded`.
        replicas: Number of engines that serve the policy.
        cluster: Cluster on which they run, as configured by the operator; `local` is the service's machine.
        gpus: See `vllm`; an engine uses one.
        router_replay: Trains each token with the experts that the engine chose for it; for mixtures of experts.
    """

    kind: Literal["embedded"] = "embedded"


class VllmEngine(StartedEngine):
    """A vLLM server that the service starts, supervises and stops.

    Attributes:
        kind: `vllm`.
        replicas: Number of vLLM servers that serve the policy.
        cluster: Cluster on which they run, as configured by the operator; `local` is the service's machine.
        gpus: Number of GPUs of each server, or a list of all servers' GPUs on the service's machine, such as `[4, 5, 6, 7]`;
            null for as many as `tensor_parallel`, separate from the trainer's if there are enough.
        max_model_len: Maximum length of prompt and answer together, in tokens; null for the model's own limit.
        dtype: Number format of the computation; `auto` for the model's own.
        gpu_memory_utilization: Share of each GPU's memory for vLLM, including the weights; leave the rest to a trainer
            on the same GPU.
        tensor_parallel: Number of GPUs over which the model is split, on each of its machines.
        nodes: Number of machines over which the layers of the model are split; more than 1 needs a cluster of kind `ray`, on
            which vLLM chooses the machines itself.
        max_sequences: Maximum batch size of generation, in requests.
        enforce_eager: Disables compilation and CUDA graphs: starts sooner, generates more slowly.
        enable_lora: Serves LoRA adapters on top of the base model and replaces them in place; false merges a single
            adapter into the base model.
        tool_call_parser: vLLM's parser of tool calls, such as `hermes`; empty for agents without tools.
        cpu_cache_gib: Size of the key-value cache on a machine without a GPU, in GiB.
        swap: How calls in flight are treated at a swap: `freeze` pauses them and resumes with the new weights;
            `drain` lets them finish first, while new ones wait in the proxy.
        drain_limit_s: Maximum wait of `drain` for calls in flight, in seconds; then they are frozen.
        recompute_cache: Whether calls that resume after a swap recompute their key-value cache with the new weights;
            if not, later calls may also reuse cached prefixes of the old weights.
        args: Further options of `vllm serve` by name, such as `{ max-num-batched-tokens = 8192 }`; true sets
            a flag, false its `--no-` form.
        router_replay: See `embedded`; needs a vLLM with `--enable-return-routed-experts`, such as 0.32.
    """

    kind: Literal["vllm"]
    max_model_len: int | None = Field(default=None, ge=16, le=16_777_216)
    dtype: str = Field(default="auto", pattern="^(auto|float32|bfloat16|float16)$")
    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    tensor_parallel: int = Field(default=1, ge=1, le=1024)
    nodes: int = Field(default=1, ge=1, le=64)
    max_sequences: int = Field(default=64, ge=1, le=65536)
    enforce_eager: bool = False
    enable_lora: bool = True
    tool_call_parser: str = Field(default="", pattern="^[a-z0-9_]{0,63}$")
    cpu_cache_gib: int = Field(default=1, ge=1, le=4096)
    swap: SwapMode = Field(default=SwapMode.FREEZE, strict=False)
    drain_limit_s: float = Field(default=300.0, gt=0, le=540)
    recompute_cache: bool = True
    args: Options = Field(default_factory=dict)

    @property
    def least_gpus(self) -> int:
        """See `StartedEngine`."""
        return self.tensor_parallel

    @model_validator(mode="after")
    def _nodes_are_not_in_args(self) -> Self:
        if self.nodes > 1 and (twice := sorted(SET_FOR_NODES & self.args.keys())):
            raise ValueError(f"args: {', '.join(twice)} is set by Fulmen where nodes is more than 1")
        return self


class ExternalEngine(Strict):
    """vLLM servers that the service does not start, in development mode, with the models' folder at the same path.

    Attributes:
        kind: `external`.
        base_url: Base URL of its OpenAI API; must be in the service's setting `FULMEN_ALGORITHM_EXTERNAL_ENGINES`.
        base_urls: Base URLs of several servers, instead of `base_url`.
        key_name: Entry of the proxy's setting `backend_keys` that holds its API key; empty for none.
        model: Model name that it serves; empty for the policy's name.
        swap: See `vllm`.
        drain_limit_s: See `vllm`.
        recompute_cache: See `vllm`.
    """

    kind: Literal["external"]
    base_url: Literal[""] | Address = ""
    base_urls: list[Address] = Field(default=[], max_length=MAX_REPLICAS)
    key_name: str = Field(default="", pattern="^[a-z0-9._-]{0,63}$")
    model: str = Field(default="", max_length=200)
    swap: SwapMode = Field(default=SwapMode.FREEZE, strict=False)
    drain_limit_s: float = Field(default=300.0, gt=0, le=540)
    recompute_cache: bool = True

    @model_validator(mode="after")
    def _has_addresses(self) -> Self:
        if bool(self.base_url) == bool(self.base_urls):
            raise ValueError("needs either base_url or base_urls")
        if twice := sorted({url for url in self.base_urls if self.base_urls.count(url) > 1}):
            raise ValueError(f"base_urls has {', '.join(twice)} more than once")
        return self


EngineSettings = Annotated[EmbeddedEngine | VllmEngine | ExternalEngine, Field(discriminator="kind")]
"""The engine of a run."""


def each_engine(engine: EngineSettings) -> list[EngineSettings]:
    """Returns the settings of each engine alone."""
    if isinstance(engine, ExternalEngine):
        urls = engine.base_urls or [engine.base_url]
        return [engine.model_copy(update={"base_url": url, "base_urls": []}) for url in urls]
    if not isinstance(engine.gpus, list):
        return [engine.model_copy(update={"replicas": 1})] * engine.replicas
    each = engine.gpus_of_each
    parts = [engine.gpus[first : first + each] for first in range(0, len(engine.gpus), each)]
    return [engine.model_copy(update={"replicas": 1, "gpus": part}) for part in parts]


class MismatchSettings(Strict):
    """Limits of the engine mismatch, as KL(engine || trainer) in nats per token.

    Attributes:
        warn: Mismatch above which the run gets a notice. Rounding to bfloat16 causes up to 0.002; a wrong temperature
            or other weights cause more than 0.005 (docs/engines.md).
        stop: Mismatch above which the run fails; null for no limit.
        every: Minimum number of steps between two notices.
    """

    warn: float = Field(default=0.005, gt=0)
    stop: float | None = Field(default=None, gt=0)
    every: int = Field(default=10, ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.stop is not None and self.stop < self.warn:
            raise ValueError("stop must be at least warn")
        return self
