"""Trainers: the primitives of training, for your own training loops."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

from fulmen.algorithm.v1 import trainer_service_pb2
from fulmen.algorithm.v1 import trainer_service_pb2 as pb
from fulmen.client.aio.base import Part, Session, listed
from fulmen.client.trainers import BackwardResult, Completion, OptimResult, Row, TrainerCheckpoint
from fulmen.client.view import Named, name_of
from fulmen.errors import DeadlineExceeded, QuotaExceeded, TrainerLost, TrainerSequenceInvalid, Unavailable

__all__ = ["AsyncTrainer", "AsyncTrainers"]

TIMEOUT_S: Final = 600.0
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 10.0


class AsyncTrainer:
    """A trainer: its weights stay on the algorithm service. As a context manager it is saved and unloaded at the end.

    Every call may wait for earlier calls, for weights to be loaded, and for a restart of the service, at most `timeout_s` in
    all. A call whose answer was lost is sent again and is not carried out twice.
    """

    def __init__(self, session: Session, proto: pb.Trainer, *, timeout_s: float = TIMEOUT_S) -> None:
        """Keeps the trainer; reads nothing."""
        self._session = session
        self._proto = proto
        self._sequence = int(proto.sequence)
        self._step = int(proto.step)
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
        self._is_deleted = False

    def __repr__(self) -> str:
        """Shows id, policy and step."""
        return f"{type(self).__name__}(id={self.id!r}, policy={self.policy!r}, step={self.step})"

    async def __aenter__(self) -> AsyncTrainer:
        """Returns the trainer."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        """Saves and unloads it."""
        await self.close()

    @property
    def proto(self) -> trainer_service_pb2.Trainer:
        """The message of the trainer, as last received."""
        return self._proto

    @property
    def name(self) -> str:
        """`projects/{project}/trainers/{id}`."""
        return str(self.proto.name)

    @property
    def id(self) -> str:
        """The id in its name."""
        return self.name.rpartition("/")[2]

    @property
    def policy(self) -> str:
        """Name of the policy that it trains."""
        return str(self.proto.policy.name)

    @property
    def step(self) -> int:
        """Optimizer steps taken, as far as this object knows."""
        return self._step

    @property
    def checkpoints(self) -> list[TrainerCheckpoint]:
        """Its named checkpoints, as last received, newest first."""
        return [TrainerCheckpoint(each) for each in self.proto.checkpoints]

    async def refresh(self) -> AsyncTrainer:
        """Reads the current state of the trainer, so that later calls continue from it. Returns the trainer
        itself."""
        request = pb.GetTrainerRequest(name=self.name)
        self._heard((await self._session.services.trainers.GetTrainer(request)).trainer)
        return self

    async def forward_backward(
        self,
        rows: Sequence[Row],
        *,
        loss: str = "cross_entropy",
        settings: Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        fresh: bool = False,
    ) -> BackwardResult:
        """Computes the loss of rows and adds its gradient to the gradients of earlier calls since the last
        `optim_step`.

        Args:
            rows: the rows.
            loss: `cross_entropy`, `reinforce`, `importance`, `clip`, `gspo`, `cispo`, `sapo` or `dppo`.
            settings: settings of the loss, such as `{"low": 0.2, "high": 0.28}` for `clip` (docs/advantages.md).
            temperature: temperature at which the rows were sampled.
            fresh: whether to drop the gradient of earlier calls since the last step first, so that a step can be repeated.

        Raises:
            ArgumentInvalid: with every problem of the rows.
            TrainerSequenceInvalid: if the trainer's state is not the expected one: it lost calls, or another program
                trains it.
            TrainerLost: if its process ended during the call.
        """
        request = self._pass(rows, loss, settings, temperature)
        request.fresh = fresh
        return _backward(await self._changed(self._session.services.trainers.ForwardBackward, request))

    async def forward(
        self,
        rows: Sequence[Row],
        *,
        loss: str = "cross_entropy",
        settings: Mapping[str, Any] | None = None,
        temperature: float = 1.0,
    ) -> BackwardResult:
        """Computes the same as `forward_backward` without a gradient, for example to validate; changes nothing."""
        request = self._pass(rows, loss, settings, temperature)
        request.forward_only = True
        async with self._turn:
            request.sequence = self._sequence
            return _backward(await self._sent(self._session.services.trainers.ForwardBackward, request))

    async def optim_step(
        self,
        *,
        learning_rate: float | None = None,
        betas: tuple[float, float] | None = None,
        epsilon: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
        average: bool = True,
    ) -> OptimResult:
        """Takes one step of AdamW with the gradient of all calls since the last step; arguments that are None are as in
        `client.trainer`.

        Args:
            learning_rate: learning rate.
            betas: decays of the first and the second moment.
            epsilon: added to the root of the second moment.
            weight_decay: decoupled weight decay of matrices.
            max_grad_norm: norm to which a larger gradient is scaled down; 0 for no limit.
            average: whether the gradient is divided by the sum of the weights of all tokens since the last step.

        Raises:
            ArgumentInvalid: if there is no gradient, or a setting is out of range.
            TrainerSequenceInvalid: as of `forward_backward`.
            TrainerLost: as of `forward_backward`.
        """
        adam = adam_settings(learning_rate, betas, epsilon, weight_decay, max_grad_norm)
        reduction = pb.GRADIENT_REDUCTION_MEAN if average else pb.GRADIENT_REDUCTION_SUM
        request = pb.OptimStepRequest(name=self.name, adam=adam, reduction=reduction)
        answer = await self._changed(self._session.services.trainers.OptimStep, request)
        self._step = int(answer.step)
        return OptimResult(step=self._step, grad_norm=answer.grad_norm, skipped=answer.skipped)

    async def sample(
        self,
        prompt: Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        n: int = 1,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> list[Completion]:
        """Samples completions with the current weights.

        Args:
            prompt: token ids, or OpenAI chat messages.
            n: number of completions.
            max_tokens: maximum length of each completion, in tokens.
            temperature: sampling temperature; 0 takes the most likely token.
            top_p: tokens are sampled from the smallest set whose probabilities sum to at least this share.
            seed: makes completions repeatable with the same weights; None for a random one.

        Raises:
            ArgumentInvalid: with every problem.
            TrainerSequenceInvalid: as of `forward_backward`.
        """
        request = pb.SampleRequest(
            name=self.name,
            completion_count=n,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        if prompt and isinstance(prompt[0], Mapping):
            request.messages_json = json.dumps([dict(each) for each in prompt if isinstance(each, Mapping)])
        else:
            request.prompt_ids.extend(each for each in prompt if not isinstance(each, Mapping))
        answer = await self._after(self._session.services.trainers.Sample, request)
        return [
            Completion(
                prompt_ids=list(answer.prompt_ids),
                token_ids=list(each.token_ids),
                logprobs=list(each.logprobs),
                text=each.text,
                stopped=each.stopped,
            )
            for each in answer.completions
        ]

    async def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Row:
        """Renders chat messages by the model's template; the tokens of the assistant's turns have the weight 1.

        Args:
            messages: OpenAI chat messages.
            tools: OpenAI definitions of tools.

        Raises:
            ArgumentInvalid: if the template refuses them.
        """
        request = pb.RenderMessagesRequest(
            name=self.name,
            messages_json=json.dumps([dict(each) for each in messages]),
            tools_json=json.dumps([dict(each) for each in tools]) if tools else "",
        )
        async with self._turn:
            answer = await self._sent(self._session.services.trainers.RenderMessages, request)
        return Row(token_ids=list(answer.row.token_ids), weights=list(answer.row.weights))

    async def save(self, checkpoint: str = "") -> str:
        """Saves the complete state, which then survives a crash; a named checkpoint can be the start of another
        trainer.

        Args:
            checkpoint: name, 1 to 63 of [a-z0-9._-]; an earlier checkpoint of this name is replaced. Empty for none.

        Returns:
            `projects/{project}/trainers/{id}/checkpoints/{checkpoint}`; empty without a name.

        Raises:
            ArgumentInvalid: if the name is malformed.
            QuotaExceeded: if there are too many named checkpoints.
            TrainerSequenceInvalid: as of `forward_backward`.
        """
        request = pb.SaveCheckpointRequest(name=self.name, checkpoint=checkpoint)
        answer = await self._after(self._session.services.trainers.SaveCheckpoint, request)
        self._heard(answer.trainer)
        return f"{self.name}/checkpoints/{checkpoint}" if checkpoint else ""

    async def publish(self, *, alias: str = "") -> str:
        """Publishes the current weights as a version of the policy, which can be served, evaluated, downloaded or
        trained further.

        Args:
            alias: alias that is moved to the version, such as `best`.

        Returns:
            `resources/policy.{policy}/versions/{n}`.

        Raises:
            TrainerSequenceInvalid: as of `forward_backward`.
        """
        request = pb.PublishVersionRequest(name=self.name, alias=alias)
        answer = await self._after(self._session.services.trainers.PublishVersion, request)
        return str(answer.policy_version)

    async def close(self) -> None:
        """Saves the state and removes the trainer from memory; its next call loads it again."""
        if self._is_deleted:
            return
        request = pb.SaveCheckpointRequest(name=self.name, unload=True)
        async with self._turn:
            answer = await self._sent(self._session.services.trainers.SaveCheckpoint, request)
            self._proto = answer.trainer

    async def delete(self) -> None:
        """Deletes the trainer with its checkpoints; versions that it published are kept."""
        await self._session.services.trainers.DeleteTrainer(pb.DeleteTrainerRequest(name=self.name))
        self._is_deleted = True

    def _pass(
        self, rows: Sequence[Row], loss: str, settings: Mapping[str, Any] | None, temperature: float
    ) -> pb.ForwardBackwardRequest:
        return pb.ForwardBackwardRequest(
            name=self.name,
            rows=[row.message() for row in rows],
            loss=loss,
            loss_settings_json=json.dumps(dict(settings)) if settings else "",
            temperature=temperature,
        )

    async def _changed(self, call: Callable[..., Awaitable[Any]], request: Any) -> Any:
        """Sends a call that changes the trainer, with the next number."""
        async with self._turn:
            request.sequence = self._sequence + 1
            answer = await self._sent(call, request)
            self._sequence = request.sequence
            return answer

    async def _after(self, call: Callable[..., Awaitable[Any]], request: Any) -> Any:
        """Sends a call that fails if the trainer's sequence differs."""
        async with self._turn:
            request.after_sequence = self._sequence
            return await self._sent(call, request)

    async def _sent(self, call: Callable[..., Awaitable[Any]], request: Any) -> Any:
        """Sends a call until it is answered, at most for the timeout."""
        try:
            return await sent(call, request, self._timeout_s)
        except (TrainerSequenceInvalid, TrainerLost) as error:
            # The error says what was lost; the next call continues from there.
            self._sequence = int(error.metadata.get("sequence", self._sequence))
            self._step = int(error.metadata.get("step", self._step))
            raise

    def _heard(self, proto: pb.Trainer) -> None:
        self._proto, self._sequence, self._step = proto, int(proto.sequence), int(proto.step)


class AsyncTrainers(Part):
    """The trainers of the project."""

    async def get(self, trainer: str | Named) -> AsyncTrainer:
        """Returns a trainer, to continue with it.

        Args:
            trainer: its id, its name, or the trainer.

        Raises:
            TrainerNotFound: if there is none.
        """
        request = pb.GetTrainerRequest(name=self._full(trainer))
        return AsyncTrainer(self._session, (await self._services.trainers.GetTrainer(request)).trainer)

    async def list(self) -> AsyncIterator[AsyncTrainer]:
        """Yields the trainers, newest first.

        >>> [each.id async for each in client.trainers.list()]
        []
        """
        request = pb.ListTrainersRequest(project=self._session.project)
        async for each in listed(self._services.trainers.ListTrainers, request, "trainers"):
            yield AsyncTrainer(self._session, each)

    async def delete(self, trainer: str | Named) -> None:
        """Deletes a trainer with its checkpoints; does nothing if it does not exist."""
        await self._services.trainers.DeleteTrainer(pb.DeleteTrainerRequest(name=self._full(trainer)))

    def _full(self, trainer: str | Named) -> str:
        name = name_of(trainer)
        return name if name.startswith("projects/") else f"{self._session.project}/trainers/{name}"


def adam_settings(
    learning_rate: float | None,
    betas: tuple[float, float] | None,
    epsilon: float | None,
    weight_decay: float | None,
    max_grad_norm: float | None,
) -> pb.AdamSettings:
    """Returns settings of the optimizer; None leaves a setting unset."""
    beta1, beta2 = betas or (None, None)
    return pb.AdamSettings(
        learning_rate=learning_rate,
        beta1=beta1,
        beta2=beta2,
        epsilon=epsilon,
        weight_decay=weight_decay,
        max_grad_norm=max_grad_norm,
    )


async def sent(call: Callable[..., Awaitable[Any]], request: Any, timeout_s: float) -> Any:
    """Sends a call, and retries it while the service is unavailable or at its limit, for at most `timeout_s`."""
    deadline_s, wait_s = time.monotonic() + timeout_s, FIRST_WAIT_S
    while True:
        left_s = deadline_s - time.monotonic()
        try:
            return await call(request, timeout=max(left_s, 1.0))
        except (Unavailable, QuotaExceeded, DeadlineExceeded) as error:
            is_full = isinstance(error, QuotaExceeded)
            pause_s = (error.retry_after_s or 0.0) if is_full else wait_s
            if not pause_s or pause_s >= deadline_s - time.monotonic():
                raise
        await asyncio.sleep(pause_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _backward(answer: pb.ForwardBackwardResponse) -> BackwardResult:
    return BackwardResult(
        loss=answer.loss_sum / answer.weight_sum if answer.weight_sum else 0.0,
        weight=answer.weight_sum,
        metrics=dict(answer.metrics),
        logprobs=[list(row.logprobs) for row in answer.rows],
    )
