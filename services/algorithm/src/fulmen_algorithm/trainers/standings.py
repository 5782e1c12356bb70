"""Reports of the remaining ranks of a group, and the orders to them. Importable without torch."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Standing(BaseModel):
    """Progress of a rank that has left its collectives.

    Attributes:
        steps: Optimiser steps that it has taken or skipped.
        complete: Whether its copy of the weights is all that a new group needs.
    """

    model_config = ConfigDict(frozen=True)

    steps: int
    complete: bool


class HandOver(BaseModel):
    """What the ranks that are left write.

    Attributes:
        folder: An empty folder.
        steps: Optimiser steps of the state.
        ranks: Ranks of the copies that are whole, which write.
        leaders: Ranks of the copy that writes weights and moments.
        with_batch: Whether the progress of the newest batch is written, so that the batch is continued.
    """

    model_config = ConfigDict(frozen=True)

    folder: Path
    steps: int
    ranks: list[int]
    leaders: list[int]
    with_batch: bool
