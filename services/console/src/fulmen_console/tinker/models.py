"""Models of programs: trainers whose calls are carried out in the order of their numbers, whatever order they arrive in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

import structlog

from fulmen.algorithm.v1 import trainer_service_pb2 as pb
from fulmen.errors import ArgumentInvalid, FulmenError, NotFound, Violation
from fulmen_console.tinker.losses import Plan
from fulmen_console.tinker.names import SAMPLER_POLICY, checkpoint_id
from fulmen_console.tinker.requests import AdamParams, LoraConfig
from fulmen_console.tinker.trainer_calls import TrainerCalls

__all__ = ["Model", "lora_of", "remove_unsaved", "sampler_request"]

MAX_AHEAD: Final = 1024
"""How far ahead of the call that is carried out the number of another may be."""
GAP_S: Final = 300.0
"""Time for which calls wait for one before them that does not arrive."""
SLOT: Final = "tinker-sampler"
"""Checkpoint from which samplers without a name are made; each replaces the one before."""
NO_RATE: Final = 1e-30
"""A learning rate of 0, which `TrainerService` refuses: no float32 weight changes by it."""
_ATTENTION: Final = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP: Final = ("gate_proj", "up_proj", "down_proj")
Result = TypeVar("Result")
_log = structlog.get_logger()


class Model:
    """A model. Thread: the event loop.

    Attributes:
        id: Its name on the wire.
        project: Whose it is.
        session_id: Session in which it was made.
        trainer: Name of its trainer.
        base: Name of its base model.
        rank: Rank of its adapters.
    """

    def __init__(self, model_id: str, project: str, session_id: str, trainer: pb.Trainer, *, base: str) -> None:
        self.id = model_id
        self.project = project
        self.session_id = session_id
        self.base = base
        self._adopt(trainer)
        self._next = 1
        self._is_running = False
        self._moved = asyncio.Condition()

    def _adopt(self, trainer: pb.Trainer) -> None:
        self.trainer = str(trainer.name)
        self.rank = int(trainer.lora.rank)
        self._sequence = int(trainer.sequence)

    async def in_turn(self, number: int, work: Callable[[], Awaitable[Result]]) -> Result:
        """Carries out the call with a number after all before it; one that fails counts as carried out.

        Raises:
            ArgumentInvalid: if the number was carried out long ago, or is too far ahead.
            NotFound: if an earlier call does not arrive.
        """
        if not self._next <= number < self._next + MAX_AHEAD:
            text = f"is {number}, but the next call of the model is {self._next}"
            raise ArgumentInvalid("The call is out of order.", violations=[Violation(field="seq_id", description=text)])
        async with self._moved:
            while self._next < number:
                await self._wait_for_a_move()
            if self._next > number:
                raise ArgumentInvalid("The call was sent twice.")
            self._is_running = True
            self._moved.notify_all()
        try:
            return await work()
        finally:
            async with self._moved:
                self._is_running = False
                self._next = number + 1
                self._moved.notify_all()

    async def _wait_for_a_move(self) -> None:
        before, patience_s = self._next, None if self._is_running else GAP_S
        try:
            async with asyncio.timeout(patience_s):
                await self._moved.wait()
        except TimeoutError:
            if self._next == before and not self._is_running:
                raise NotFound(f"Call {before} of the model, which precedes this one, did not arrive.") from None

    async def forward_backward(
        self, calls: TrainerCalls, plan: Plan, *, forward_only: bool
    ) -> tuple[list[list[float]], dict[str, float]]:
        """Computes a loss and, unless `forward_only`, adds its gradient.

        Returns:
            The log-probability of each datum's targets, and metrics whose names end with their reduction.
        """
        if plan.beta is None:
            answer = await self._pass(calls, plan, forward_only=forward_only)
            loss = float(answer.loss_sum)
        else:
            answer = await self._pass(calls, plan, forward_only=True)
            linear, loss = plan.linearized([row.logprobs for row in answer.rows])
            if not forward_only:
                await self._pass(calls, linear, forward_only=False)
        metrics = {"loss:sum": loss}
        metrics |= {f"{name}:mean": value for name, value in answer.metrics.items() if name == "clipped_share"}
        return [list(row.logprobs[1:]) for row in answer.rows], metrics

    async def _pass(self, calls: TrainerCalls, plan: Plan, *, forward_only: bool) -> pb.ForwardBackwardResponse:
        number = self._sequence + (not forward_only)
        try:
            answer = await calls.forward_backward(
                plan.request(trainer=self.trainer, sequence=number, forward_only=forward_only)
            )
        except FulmenError as error:
            # Rows are data here.
            error.violations = tuple(
                Violation(field=each.field.replace("rows", "data", 1), description=each.description)
                for each in error.violations
            )
            raise
        self._sequence = number
        return answer

    async def optim_step(self, calls: TrainerCalls, adam: AdamParams) -> dict[str, float]:
        """Takes a step with the sum of the gradients; returns metrics."""
        settings = pb.AdamSettings(
            learning_rate=adam.learning_rate or NO_RATE,
            beta1=adam.beta1,
            beta2=adam.beta2,
            epsilon=adam.eps,
            weight_decay=adam.weight_decay,
            max_grad_norm=adam.grad_clip_norm,
        )
        request = pb.OptimStepRequest(
            name=self.trainer, sequence=self._sequence + 1, adam=settings, reduction=pb.GRADIENT_REDUCTION_SUM
        )
        answer = await calls.optim_step(request)
        self._sequence += 1
        return {
            "grad_norm": float(answer.grad_norm),
            "skipped": float(answer.skipped),
            "optimizer_steps": float(answer.step),
        }

    async def save(self, calls: TrainerCalls, kind: str, name: str, *, overwrite: bool) -> None:
        """Saves a checkpoint.

        Raises:
            ArgumentInvalid: if there is one with the name, and it may not be replaced.
        """
        checkpoint = checkpoint_id(kind, name)
        if not overwrite:
            there = {each.name.rpartition("/")[2] for each in (await calls.get(self.trainer)).checkpoints}
            if checkpoint in there:
                found = Violation(field="path", description=f"{name} exists; set overwrite, or use another name")
                raise ArgumentInvalid("The checkpoint exists.", violations=[found])
        await calls.save(
            pb.SaveCheckpointRequest(name=self.trainer, after_sequence=self._sequence, checkpoint=checkpoint)
        )

    async def sampler(self, calls: TrainerCalls, request_id: str) -> str:
        """Makes a trainer that only samples, with the present weights; returns its name."""
        await calls.save(pb.SaveCheckpointRequest(name=self.trainer, after_sequence=self._sequence, checkpoint=SLOT))
        # It has the files before this call ends, and with it the turn.
        return (await calls.create(sampler_request(f"{self.trainer}/checkpoints/{SLOT}", request_id))).name

    async def load(self, calls: TrainerCalls, checkpoint: str, request_id: str) -> None:
        """Continues from a checkpoint, with a trainer of its own; the one before is removed unless it was saved."""
        before = self.trainer
        self._adopt(await calls.create(pb.CreateTrainerRequest(checkpoint=checkpoint, request_id=request_id)))
        if before != self.trainer:
            try:
                await remove_unsaved(calls, before)
            except FulmenError as error:
                _log.warning("tinker_trainer_not_removed", trainer=before, reason=error.message)

    def info(self) -> Mapping[str, Any]:
        """Returns the answer of `get_info`."""
        data = {"arch": None, "model_name": self.base, "tokenizer_id": self.base}
        return {
            "type": "get_info",
            "model_data": data,
            "model_id": self.id,
            "is_lora": True,
            "lora_rank": self.rank,
            "model_name": self.base,
        }


async def remove_unsaved(calls: TrainerCalls, trainer: str) -> None:
    """Removes a trainer from the algorithm service, unless somebody has saved it under a name."""
    with suppress(NotFound):
        found = await calls.get(trainer)
        if all(each.name.endswith(f"/{SLOT}") for each in found.checkpoints):
            await calls.delete(trainer)


def sampler_request(checkpoint: str, request_id: str) -> pb.CreateTrainerRequest:
    """Returns the request for a trainer that only samples."""
    request = pb.CreateTrainerRequest(checkpoint=checkpoint, request_id=request_id, autosave_steps=0)
    request.policy.name = SAMPLER_POLICY
    return request


def lora_of(config: LoraConfig) -> pb.TrainerLora:
    """Returns adapters. The unembedding has none, whatever the value of `train_unembed`.

    Raises:
        ArgumentInvalid: if nothing would train.
    """
    lora = pb.TrainerLora(rank=config.rank)
    if not (config.train_attn or config.train_mlp):
        text = "adapters are on attention and MLP layers: train_attn or train_mlp must be true"
        raise ArgumentInvalid(
            "The request is malformed.", violations=[Violation(field="lora_config", description=text)]
        )
    if not config.train_mlp:
        lora.targets.extend(_ATTENTION)
    if not config.train_attn:
        lora.targets.extend(_MLP)
    return lora
