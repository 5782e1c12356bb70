"""The process that holds the weights of trainers: one with all its weights, or several with adapters on the same base.

Invariants: the weights of a base are in memory once, whatever number of trainers have adapters on it; apart from them
trainers share nothing, so a trainer's numbers do not depend on others.
"""

import argparse
import copy
import json
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from pydantic import TypeAdapter
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from fulmen_algorithm.loops.calls import (
    AnyCall,
    Close,
    Draw,
    Open,
    Opened,
    Pass,
    Render,
    Rendered,
    Sampled,
    Step,
    Stepped,
    WriteState,
    WriteWeights,
)
from fulmen_algorithm.loops.generation import completions
from fulmen_algorithm.losses.objectives import Loss
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.trainers.calls import Answer, known_error, public_message
from fulmen_algorithm.trainers.in_process import free_memory
from fulmen_algorithm.trainers.local import LocalTrainer, load_policy
from fulmen_algorithm.training.compute import ComputeSettings
from fulmen_algorithm.training.files import full_disk_as_storage_failed
from fulmen_algorithm.training.policy import PolicyModel
from fulmen_algorithm.training.primitives import adam_step, forward_backward, trainable
from fulmen_algorithm.training.primitives_settings import PassSettings
from fulmen_algorithm.training.randomness import OwnRandomness
from fulmen_algorithm.training.rows import sft_row
from fulmen_algorithm.training.settings import LoraSettings, OptimizerSettings
from fulmen_algorithm.training.state import TrainingState, make_state
from fulmen_algorithm.training.state_files import write_state
from fulmen_algorithm.weights.lora import TargetsUnknown
from fulmen_algorithm.weights.publishing import WrittenWeights
from fulmen_exchange.ranks import Ranks

GRADIENTS = "gradients.pt"
LONGEST_WITHOUT_LIMIT = 32_768
"""Longest row of a model that names no limit, in tokens."""
_LOSS: TypeAdapter[Loss] = TypeAdapter(Loss)
_UNSET_RATE = 0.0
"""Each step sets its learning rate."""


class LoopTrainer(LocalTrainer):
    """A trainer whose gradients add up over calls."""

    def __init__(self, state: TrainingState, randomness: OwnRandomness) -> None:
        """Holds a state."""
        super().__init__(state, randomness=randomness)
        self.policy = state.policy

    @property
    def max_tokens(self) -> int:
        """Longest row, in tokens."""
        return int(getattr(self.policy.model.config, "max_position_embeddings", 0) or LONGEST_WITHOUT_LIMIT)

    def pass_over(self, call: Pass) -> object:
        """Adds the gradient of rows."""
        settings = PassSettings(
            loss=_LOSS.validate_json(call.loss) if call.loss else None,
            temperature=call.temperature,
            forward_only=call.forward_only,
            fresh=call.fresh,
        )
        with self._randomness.in_use():
            return forward_backward(self._state, call.rows, call.weights, settings=settings)

    def step(self, call: Step) -> Stepped:
        """Takes a step."""
        norm, skipped = adam_step(self._state, call.step)
        return Stepped(grad_norm=norm, skipped=skipped)

    def write_state(self, folder: Path) -> None:
        """Writes the complete training state, gradients included."""
        found = {name: p.grad.cpu() for name, p in self.policy.model.named_parameters() if p.grad is not None}
        with self._randomness.in_use(), full_disk_as_storage_failed(folder):
            # Without tokenizer: it is as large as small adapters, and that of the first weights is there.
            write_state(self._state, folder, tokenizer=False)
            torch.save(found, folder / GRADIENTS)

    def read_state(self, folder: Path) -> None:
        """Restores the state written by `write_state`."""
        super().read_state(folder)
        found = torch.load(folder / GRADIENTS, map_location=self.policy.device, weights_only=True)
        for name, parameter in self.policy.model.named_parameters():
            parameter.grad = found.get(name)


@dataclass(slots=True, kw_only=True)
class SharedBase:
    """A model whose weights several trainers read."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    trainers: set[str] = field(default_factory=set)

    def copied(self) -> PreTrainedModel:
        """Returns a model with layers of its own, whose weights are these."""
        weights: dict[int, Any] = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        return copy.deepcopy(self.model, weights)


class LoopWorker:
    """Carries out calls."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(options.threads)
        transformers_logging.disable_progress_bar()
        self._device = torch.device(options.device)
        self._bases: dict[str, SharedBase] = {}
        self._trainers: dict[str, LoopTrainer] = {}

    def answer(self, message: bytes) -> Answer:
        """Carries out an encoded call; an error is returned as its answer."""
        call = msgspec.msgpack.decode(message, type=AnyCall)
        try:
            return Answer(result=msgspec.msgpack.encode(self._result(call)))
        except Exception as error:  # noqa: BLE001  (whatever it is, it is reported to the service, and the process exits)
            if isinstance(call, Pass | Draw) and _is_memory(error):
                error = RunFailed("The call needs more memory than is available.")
            if not isinstance(error, RunFailed):
                traceback.print_exc()
            return Answer(error=known_error(error), text=public_message(error))

    def _result(self, call: AnyCall) -> object:
        match call:
            case Open():
                return self._open(call)
            case Close():
                self._close(call.trainer)
            case Pass():
                return self._trainers[call.trainer].pass_over(call)
            case Step():
                return self._trainers[call.trainer].step(call)
            case Draw():
                return _sampled(self._trainers[call.trainer], call)
            case Render():
                return _rendered(self._trainers[call.trainer].tokenizer, call)
            case WriteState():
                self._trainers[call.trainer].write_state(Path(call.folder))
            case WriteWeights():
                return self._write_weights(call)
        return None

    def _open(self, call: Open) -> Opened:
        randomness = OwnRandomness(call.seed)
        try:
            with randomness.in_use():
                policy = self._policy(call)
            policy.prepare(ComputeSettings(), Ranks(device=self._device))
            state = make_state(policy, OptimizerSettings(learning_rate=_UNSET_RATE))
            trainer = LoopTrainer(state, randomness)
            if call.state:
                trainer.read_state(Path(call.state))
        except BaseException:
            self._leave_base(call.trainer)
            raise
        self._trainers[call.trainer] = trainer
        embeddings: Any = policy.model.get_input_embeddings()
        return Opened(max_tokens=trainer.max_tokens, vocabulary=int(embeddings.weight.shape[0]))

    def _policy(self, call: Open) -> PolicyModel:
        if not call.lora:
            return load_policy(Path(call.model), str(self._device))
        if call.model not in self._bases:
            loaded = load_policy(Path(call.model), str(self._device))
            loaded.model.requires_grad_(False)
            self._bases[call.model] = SharedBase(model=loaded.model, tokenizer=loaded.tokenizer)
        base = self._bases[call.model]
        base.trainers.add(call.trainer)
        try:
            return PolicyModel(base.copied(), base.tokenizer, lora=LoraSettings.model_validate_json(call.lora))
        except TargetsUnknown as error:
            raise RunFailed(str(error)) from error

    def _close(self, trainer: str) -> None:
        self._trainers.pop(trainer, None)
        self._leave_base(trainer)
        free_memory()

    def _leave_base(self, trainer: str) -> None:
        for folder, base in list(self._bases.items()):
            base.trainers.discard(trainer)
            if not base.trainers:
                del self._bases[folder]

    def _write_weights(self, call: WriteWeights) -> WrittenWeights:
        written = self._trainers[call.trainer].write_weights(Path(call.folder), call.order)
        assert written is not None  # a process alone is the first
        return written


def base_bytes(worker: LoopWorker) -> tuple[int, int]:
    """Returns the bytes of all distinct weights in memory, and of the trained ones among them."""
    seen: dict[int, int] = {}
    trained: dict[int, int] = {}
    for trainer in worker._trainers.values():
        for parameter in trainer.policy.model.parameters():
            seen[parameter.data_ptr()] = parameter.nbytes
        for parameter in trainable(trainer.policy):
            trained[parameter.data_ptr()] = parameter.nbytes
    return sum(seen.values()), sum(trained.values())


def _sampled(trainer: LoopTrainer, call: Draw) -> Sampled:
    prompt = call.prompt_ids or _templated(trainer.tokenizer, json.loads(call.messages), None, generation=True)
    if len(prompt) + call.max_tokens > trainer.max_tokens:
        raise ValueError(
            f"max_tokens: the prompt has {len(prompt)} tokens, and {call.max_tokens} more are beyond the model's "
            f"{trainer.max_tokens}"
        )
    return Sampled(prompt_ids=prompt, completions=completions(trainer.policy, prompt, call))


def _rendered(tokenizer: PreTrainedTokenizerBase, call: Render) -> Rendered:
    messages, tools = json.loads(call.messages), json.loads(call.tools) if call.tools else None
    if any(message.get("role") == "assistant" for message in messages):
        try:
            row = sft_row(tokenizer, messages, row_id="messages", tools=tools)
        except ValueError as error:
            raise ValueError(f"messages: {error}") from error
        return Rendered(token_ids=list(row.token_ids), trains=list(row.loss_mask))
    ids = _templated(tokenizer, messages, tools, generation=True)
    return Rendered(token_ids=ids, trains=[False] * len(ids))


def _templated(
    tokenizer: PreTrainedTokenizerBase, messages: list[Any], tools: list[Any] | None, *, generation: bool
) -> list[int]:
    # Imported late: only the template depends on jinja2.
    from jinja2 import TemplateError

    try:
        ids: list[int] = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation, tokenize=True, return_dict=False
        )  # type: ignore[assignment]  # one conversation, tokenised, gives a list of ids
    except (TemplateError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"messages: the chat template refuses them: {error}") from error
    if not ids:
        raise ValueError("messages: the chat template renders no tokens")
    return ids


def _is_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
