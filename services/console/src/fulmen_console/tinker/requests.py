"""The JSON bodies of the `tinker` package that are read, version 0.38. Fields that change nothing here are skipped."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from fulmen.errors import ArgumentInvalid, Violation

__all__ = [
    "AdamParams",
    "CancelFuture",
    "CreateModel",
    "CreateSamplingSession",
    "LoadWeights",
    "LoraConfig",
    "OfModel",
    "OfNumber",
    "OfSession",
    "OptimStep",
    "Prompt",
    "RetrieveFuture",
    "Sample",
    "SamplingParams",
    "SaveWeights",
    "SaveWeightsForSampler",
    "read",
]

MAX_REPORTED: Final = 50
MAX_SAMPLES: Final = 256
MAX_STOP_IDS: Final = 64
MAX_STOP_TEXTS: Final = 16
MAX_CHUNKS: Final = 4096
"""Of a prompt."""
MAX_TOKENS: Final = 262_144
"""Of a chunk."""
Id = Annotated[str, Field(max_length=256)]
Number = Annotated[int, Field(ge=0, lt=2**62)]


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class _Read(BaseModel):
    """A body. Its size is bounded, and long lists end with their first problem: telling of each takes minutes."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), allow_inf_nan=False)
    max_bytes: ClassVar[int] = 64 * 1024


Body = TypeVar("Body", bound=_Read)


class OfSession(_Read):
    """Names a session."""

    session_id: Id


class OfModel(_Read):
    """Names a model."""

    model_id: Id


class OfNumber(OfModel):
    """Names a model and the number of a call."""

    seq_id: Number


class LoraConfig(_Read):
    """Adapters."""

    rank: Annotated[int, Field(ge=1, le=1024)]
    seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(_Read):
    """Kind of the optimizer."""

    type: Literal["adamw"] = "adamw"


class CreateModel(OfSession):
    """`create_model`."""

    model_seq_id: Number
    base_model: Id
    lora_config: LoraConfig
    optimizer_config: Optimizer = Optimizer()


class AdamParams(_Read):
    """Settings of a step."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(gt=0, lt=1)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class OptimStep(OfNumber):
    """`optim_step`; other optimizers come as `optimizer_params`."""

    adam_params: AdamParams


class SaveWeights(OfNumber):
    """`save_weights`."""

    path: Id
    overwrite: bool = False


class SaveWeightsForSampler(OfNumber):
    """`save_weights_for_sampler`: under a name, or for the sampler with that number."""

    path: Id | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"


class LoadWeights(_Read):
    """`load_weights`: into a new model of a session, or an existing one."""

    path: Id
    optimizer: bool
    session_id: Id | None = None
    model_seq_id: Number | None = None
    model_id: Id | None = None
    seq_id: Number | None = None


class CreateSamplingSession(OfSession):
    """`create_sampling_session`."""

    sampling_session_seq_id: Number
    base_model: Id | None = None
    model_path: Id | None = None


class Chunk(_Read):
    """A part of a prompt; only text."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: Annotated[list[TokenId], FailFast(), Field(max_length=MAX_TOKENS)]


class Prompt(_Read):
    """A prompt."""

    chunks: Annotated[list[Chunk], FailFast(), Field(max_length=MAX_CHUNKS)]


class SamplingParams(_Read):
    """How tokens are sampled. `stop` as null is the model's own end, as a list of ids it replaces that."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**62), lt=2**62)] | None = None
    stop: (
        str
        | Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)]
        | Annotated[list[str], Field(max_length=MAX_STOP_TEXTS)]
        | None
    ) = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Literal[-1] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class Sample(_Read):
    """`asample`."""

    max_bytes: ClassVar[int] = 4 * 2**20
    sampling_session_id: Id
    seq_id: Number
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: Prompt
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Literal[0] = 0
    topk_sample_logprobs: Literal[0] = 0
    target_prompt_logprobs: None = None
    prompt_alt_tokens_k: Literal[0] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: Literal[False] | None = None


class RetrieveFuture(_Read):
    """`retrieve_future`."""

    request_id: Id


class CancelFuture(RetrieveFuture):
    """`cancel_future`."""


def read(kind: type[Body], body: bytes) -> Body:
    """Reads a body.

    Raises:
        ArgumentInvalid: with every problem.
    """
    if len(body) > kind.max_bytes:
        found_size = Violation(field="body", description=f"must have at most {kind.max_bytes} bytes, not {len(body)}")
        raise ArgumentInvalid("The request is malformed.", violations=[found_size])
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
    found = [_violation(each) for each in problems[:MAX_REPORTED]]
    if len(problems) > MAX_REPORTED:
        found.append(
            Violation(field="body", description=f"{len(problems) - MAX_REPORTED} more problems are not listed")
        )
    raise ArgumentInvalid("The request is malformed.", violations=found) from None


def _violation(problem: Any) -> Violation:
    field = ".".join(str(part)[:64] for part in problem["loc"]) or "body"
    return Violation(field=field, description=str(problem["msg"]))
