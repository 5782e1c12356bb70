"""Calls to the process that holds the weights of trainers, and their answers: plain values, importable without torch."""

from pathlib import Path
from typing import TypeVar

import msgspec

from fulmen_algorithm.trainers.calls import frame
from fulmen_algorithm.training.primitives_settings import AdamStep
from fulmen_algorithm.training.rows import Row
from fulmen_algorithm.weights.publishing import WeightsOrder

Result = TypeVar("Result")


class Call(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call.

    Attributes:
        trainer: Name of the trainer.
    """

    trainer: str


class Open(Call, frozen=True, kw_only=True):
    """Loads a trainer.

    Attributes:
        model: Model folder; trainers with adapters on the same folder share its weights.
        lora: `LoraSettings` as JSON; empty to train all weights.
        seed: Seed of everything random.
        state: Folder of the saved state to continue from; empty to begin.
    """

    model: str
    lora: bytes
    seed: int
    state: str


class Close(Call, frozen=True, kw_only=True):
    """Removes a trainer from memory."""


class Pass(Call, frozen=True, kw_only=True):
    """Adds the gradient of rows; see `training.primitives.forward_backward`.

    Attributes:
        weights: Weight of each token of each row.
        loss: `Loss` as JSON; empty for cross-entropy.
    """

    rows: list[Row]
    weights: list[list[float]]
    loss: bytes
    temperature: float
    forward_only: bool
    fresh: bool = False


class Step(Call, frozen=True, kw_only=True):
    """Takes a step; see `training.primitives.adam_step`."""

    step: AdamStep


class Draw(Call, frozen=True, kw_only=True):
    """Samples completions.

    Attributes:
        prompt_ids: Prompt; empty if it is rendered of `messages`.
        messages: OpenAI chat messages as JSON.
        count: Number of completions.
        max_tokens: Maximum length of each.
        seed: Seed of the first one; each has its own.
        stop_ids: Tokens that end one, in place of the model's own; empty for those.
        stop_texts: Texts that end one.
    """

    prompt_ids: list[int]
    messages: bytes
    count: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    stop_ids: list[int] = []
    stop_texts: list[str] = []


class Render(Call, frozen=True, kw_only=True):
    """Renders messages by the chat template; messages and tools as JSON."""

    messages: bytes
    tools: bytes


class WriteState(Call, frozen=True, kw_only=True):
    """Writes the complete state to a folder."""

    folder: str


class WriteWeights(Call, frozen=True, kw_only=True):
    """Writes the weights for engines to a new folder."""

    folder: str
    order: WeightsOrder


AnyCall = Open | Close | Pass | Step | Draw | Render | WriteState | WriteWeights


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a loaded trainer.

    Attributes:
        max_tokens: Longest row, in tokens.
        vocabulary: Number of token ids.
    """

    max_tokens: int
    vocabulary: int


class Stepped(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a step."""

    grad_norm: float
    skipped: bool


class Drawn(msgspec.Struct, frozen=True, kw_only=True):
    """One completion."""

    token_ids: list[int]
    logprobs: list[float]
    text: str
    stopped: bool


class Sampled(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and its completions."""

    prompt_ids: list[int]
    completions: list[Drawn]


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids, and which of them a model would have sampled."""

    token_ids: list[int]
    trains: list[bool]


def encode(call: Call) -> bytes:
    """Encodes a call as a frame."""
    return frame(msgspec.msgpack.encode(call))


def decode_result(result: bytes, kind: type[Result]) -> Result:
    """Decodes a result."""
    return msgspec.msgpack.decode(result, type=kind)


def absolute(folder: Path) -> str:
    """Returns a folder as calls name it."""
    return str(folder.absolute())
