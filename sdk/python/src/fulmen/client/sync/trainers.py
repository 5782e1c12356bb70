"""Trainers: the primitives of training, for a loop of your own. Made by tools/sync_client.py of `fulmen.client.aio.trainers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from fulmen.algorithm.v1 import trainer_service_pb2
from fulmen.client.aio.trainers import AsyncTrainer, AsyncTrainers
from fulmen.client.face import Face
from fulmen.client.trainers import BackwardResult, Completion, OptimResult, Row, TrainerCheckpoint
from fulmen.client.view import Named

__all__ = ["Trainer", "Trainers"]


class Trainer(Face):
    """A trainer: its weights stay on the algorithm service. As a context manager it is saved and unloaded at the end.

    Every call may wait for earlier ones, for weights to be loaded, and while the service restarts, for `timeout_s` in all. A
    call whose answer was lost is sent again and is not carried out twice.
    """

    _wraps = AsyncTrainer
    _aio: AsyncTrainer

    def __repr__(self) -> str:
        """Shows id, policy and step."""
        return self._aio.__repr__().removeprefix("Async")

    def __enter__(self) -> Trainer:
        """Returns the trainer."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Saves and unloads it."""
        self.close()

    @property
    def proto(self) -> trainer_service_pb2.Trainer:
        """The trainer as it was when it was last heard of."""
        return self._aio.proto

    @property
    def name(self) -> str:
        """`projects/{project}/trainers/{id}`."""
        return self._aio.name

    @property
    def id(self) -> str:
        """The id in its name."""
        return self._aio.id

    @property
    def policy(self) -> str:
        """Name of the policy that it trains."""
        return self._aio.policy

    @property
    def step(self) -> int:
        """Optimizer steps taken, as far as this object knows."""
        return self._aio.step

    @property
    def checkpoints(self) -> list[TrainerCheckpoint]:
        """Its named checkpoints when it was last heard of, newest first."""
        return self._aio.checkpoints

    def refresh(self) -> Trainer:
        """Reads where the trainer stands, and continues from there. Returns the trainer itself."""
        self._call(self._aio.refresh())
        return self

    def forward_backward(
        self,
        rows: Sequence[Row],
        *,
        loss: str = "cross_entropy",
        settings: Mapping[str, Any] | None = None,
        temperature: float = 1.0,
        fresh: bool = False,
    ) -> BackwardResult:
        """Computes the loss of rows and adds its gradient to those of earlier calls since the last `optim_step`.

        Args:
            rows: the rows.
            loss: `cross_entropy`, `reinforce`, `importance`, `clip`, `gspo`, `cispo`, `sapo` or `dppo`.
            settings: settings of the loss, such as `{"low": 0.2, "high": 0.28}` of `clip` (docs/advantages.md).
            temperature: temperature at which the rows were sampled.
            fresh: whether the gradient of earlier calls since the last step is dropped first, so that a step can be begun again.

        Raises:
            ArgumentInvalid: with every problem of the rows.
            TrainerSequenceInvalid: if the trainer stands elsewhere: it lost calls, or another program trains it.
            TrainerLost: if its process ended during the call.
        """
        return self._call(
            self._aio.forward_backward(rows, loss=loss, settings=settings, temperature=temperature, fresh=fresh)
        )

    def forward(
        self,
        rows: Sequence[Row],
        *,
        loss: str = "cross_entropy",
        settings: Mapping[str, Any] | None = None,
        temperature: float = 1.0,
    ) -> BackwardResult:
        """Computes the same as `forward_backward` without a gradient, for example to validate; changes nothing."""
        return self._call(self._aio.forward(rows, loss=loss, settings=settings, temperature=temperature))

    def optim_step(
        self,
        *,
        learning_rate: float | None = None,
        betas: tuple[float, float] | None = None,
        epsilon: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
        average: bool = True,
    ) -> OptimResult:
        """Takes one step of AdamW with the gradient of all calls since the last one; what is None is as in `client.trainer`.

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
        return self._call(
            self._aio.optim_step(
                learning_rate=learning_rate,
                betas=betas,
                epsilon=epsilon,
                weight_decay=weight_decay,
                max_grad_norm=max_grad_norm,
                average=average,
            )
        )

    def sample(
        self,
        prompt: Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        n: int = 1,
        max_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int | None = None,
    ) -> list[Completion]:
        """Samples completions with the present weights.

        Args:
            prompt: token ids, or OpenAI chat messages.
            n: number of completions.
            max_tokens: maximum length of each.
            temperature: temperature; 0 takes the most likely token.
            top_p: share of probability from which tokens are taken.
            seed: makes completions repeatable with the same weights; None for a random one.

        Raises:
            ArgumentInvalid: with every problem.
            TrainerSequenceInvalid: as of `forward_backward`.
        """
        return self._call(
            self._aio.sample(prompt, n=n, max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
        )

    def render(self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None) -> Row:
        """Renders chat messages by the model's template; the tokens of the assistant's turns have the weight 1.

        Args:
            messages: OpenAI chat messages.
            tools: OpenAI definitions of tools.

        Raises:
            ArgumentInvalid: if the template refuses them.
        """
        return self._call(self._aio.render(messages, tools=tools))

    def save(self, checkpoint: str = "") -> str:
        """Saves the complete state, which then survives a crash; under a name, a trainer can begin with it.

        Args:
            checkpoint: name, 1 to 63 of [a-z0-9._-]; an earlier checkpoint of this name is replaced. Empty for none.

        Returns:
            `projects/{project}/trainers/{id}/checkpoints/{checkpoint}`; empty without a name.

        Raises:
            ArgumentInvalid: if it is no name.
            QuotaExceeded: if there are too many names.
            TrainerSequenceInvalid: as of `forward_backward`.
        """
        return self._call(self._aio.save(checkpoint))

    def publish(self, *, alias: str = "") -> str:
        """Publishes the present weights as a version of the policy: to serve, evaluate, download or train them further.

        Args:
            alias: alias that is moved to the version, such as `best`.

        Returns:
            `resources/policy.{policy}/versions/{n}`.

        Raises:
            TrainerSequenceInvalid: as of `forward_backward`.
        """
        return self._call(self._aio.publish(alias=alias))

    def close(self) -> None:
        """Saves the state and removes the trainer from memory; its next call loads it again."""
        self._call(self._aio.close())

    def delete(self) -> None:
        """Deletes the trainer with its checkpoints; versions that it published stay."""
        self._call(self._aio.delete())

    @property
    def aio(self) -> AsyncTrainer:
        """The same, asynchronous, over the same connection."""
        return self._aio


class Trainers(Face):
    """The trainers of the project."""

    _wraps = AsyncTrainers
    _aio: AsyncTrainers

    def get(self, trainer: str | Named) -> Trainer:
        """Returns a trainer, to continue with it.

        Args:
            trainer: its id, its name, or the trainer.

        Raises:
            TrainerNotFound: if there is none.
        """
        return self._call(self._aio.get(trainer))

    def list(self) -> Iterator[Trainer]:
        """Yields the trainers, newest first.

        >>> [each.id for each in client.trainers.list()]
        []
        """
        return self._iterate(self._aio.list())

    def delete(self, trainer: str | Named) -> None:
        """Deletes a trainer with its checkpoints; does nothing if there is none."""
        self._call(self._aio.delete(trainer))

    @property
    def aio(self) -> AsyncTrainers:
        """The same, asynchronous, over the same connection."""
        return self._aio
