"""Trainers of loops outside of the service: what they are given."""

from __future__ import annotations

import fulmen
from fulmen.client.aio.trainers import AsyncTrainer
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import StoreHandle

__all__ = ["LORA", "ROWS", "client_of", "steps"]

LORA = fulmen.Lora(rank=4)
ROWS = [fulmen.Row(token_ids=[8, 9, 10 + n, 11, 12 + n]) for n in range(6)]


def client_of(store: StoreHandle, algorithm: str) -> fulmen.AsyncClient:
    return fulmen.AsyncClient(
        store=store.target, algorithm=algorithm, llm_proxy="127.0.0.1:1", token=store.token(Role.CLIENT)
    )


async def steps(trainer: AsyncTrainer, numbers: range) -> list[float]:
    """Takes steps, each on a part of the rows; returns the losses."""
    losses = []
    for number in numbers:
        losses.append((await trainer.forward_backward(ROWS[number % 3 :])).loss)
        await trainer.optim_step(learning_rate=1e-2)
    return losses
