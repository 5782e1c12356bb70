"""Calls of `TrainerService` with a caller's token: patient while the service is busy or restarts, and never carried out twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from fulmen.algorithm.v1 import trainer_service_pb2 as pb
from fulmen.algorithm.v1.trainer_service_pb2_grpc import TrainerServiceStub
from fulmen.errors import FulmenError, NotFound, QuotaExceeded, Unavailable
from fulmen.rpc.channel import FulmenChannel

__all__ = ["TrainerCalls"]

CALL_LIMIT_S: Final = 3600.0
PATIENCE_S: Final = 300.0
"""Time for which a call that was refused as too many, or met no service, is tried again."""
FIRST_WAIT_S: Final = 0.5
LONGEST_WAIT_S: Final = 10.0
Answer = TypeVar("Answer", bound=Message)


class TrainerCalls:
    """The trainers of one caller."""

    def __init__(self, channel: FulmenChannel, authorization: str) -> None:
        """`authorization` is the caller's header; empty in dev mode without a token."""
        self._stub: Any = TrainerServiceStub(channel)
        self._metadata = (("authorization", authorization),) if authorization else ()

    async def create(self, request: pb.CreateTrainerRequest) -> pb.Trainer:
        """Creates a trainer; one that the same request id has created is returned again."""
        return (await self._patient(self._stub.CreateTrainer, request)).trainer

    async def get(self, name: str) -> pb.Trainer:
        """Returns a trainer."""
        return (await self._patient(self._stub.GetTrainer, pb.GetTrainerRequest(name=name))).trainer

    async def list(self) -> list[pb.Trainer]:
        """Returns the trainers of the caller's project, at most 1000."""
        return list((await self._patient(self._stub.ListTrainers, pb.ListTrainersRequest(page_size=1000))).trainers)

    async def delete(self, name: str) -> None:
        """Deletes a trainer, if there is one."""
        with suppress(NotFound):
            await self._patient(self._stub.DeleteTrainer, pb.DeleteTrainerRequest(name=name))

    async def forward_backward(self, request: pb.ForwardBackwardRequest) -> pb.ForwardBackwardResponse:
        """Adds a gradient; its number makes sure that it is added once."""
        return await self._patient(self._stub.ForwardBackward, request)

    async def optim_step(self, request: pb.OptimStepRequest) -> pb.OptimStepResponse:
        """Takes a step, once."""
        return await self._patient(self._stub.OptimStep, request)

    async def sample(self, request: pb.SampleRequest) -> pb.SampleResponse:
        """Samples."""
        return await self._patient(self._stub.Sample, request)

    async def save(self, request: pb.SaveCheckpointRequest) -> pb.Trainer:
        """Saves a checkpoint."""
        return (await self._patient(self._stub.SaveCheckpoint, request)).trainer

    async def _patient(self, rpc: Callable[..., Awaitable[Any]], request: Message) -> Any:
        loop = asyncio.get_running_loop()
        ends_at, wait_s = loop.time() + PATIENCE_S, FIRST_WAIT_S
        while True:
            try:
                return await rpc(request, timeout=CALL_LIMIT_S, metadata=self._metadata)
            except (QuotaExceeded, Unavailable) as error:
                if loop.time() + wait_s > ends_at or not _may_pass(error):
                    raise
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _may_pass(error: FulmenError) -> bool:
    return isinstance(error, Unavailable) or error.retry_after_s is not None
