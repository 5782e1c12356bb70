"""Settings of the exchange over gRPC."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fulmen_exchange.strict import Strict


class GrpcLinkSettings(Strict):
    """Ranks of several sites, through shards of the sum that algorithm services hold.

    Attributes:
        targets: Addresses, `host:port`, one for each shard of the sum; the same may stand there several times.
        quorum: The share of ranks whose payloads make a sum once the deadline for stragglers has passed; 1 waits for all.
            What a codec does not compress always waits for all.
        min_wait_s: The shortest deadline for stragglers, in seconds after the first chunk.
        max_wait_s: The longest.
        straggler_timeout_s: A rank that keeps a sum waiting for so long is removed.
        lease_s: So is a rank that is silent for so long.
        deadline_s: How long a call waits for its sum, restarts of shards and all, before the run fails.
        piece_bytes: What is summed as it is goes to a shard in pieces of at most so many bytes. While small ones go up a
            line, sums of others come down; large ones take less of the processors.
    """

    kind: Literal["grpc"] = "grpc"
    targets: tuple[str, ...] = Field(min_length=1, max_length=4096, strict=False)
    quorum: float = Field(default=1.0, gt=0, le=1)
    min_wait_s: float = Field(default=0.2, gt=0)
    max_wait_s: float = Field(default=30.0, gt=0)
    straggler_timeout_s: float = Field(default=300.0, gt=0, le=86_400)
    lease_s: float = Field(default=15.0, ge=0.1, le=3600)
    deadline_s: float = Field(default=900.0, gt=0)
    piece_bytes: int = Field(default=2**20, ge=2**16, le=2**28)

    @model_validator(mode="after")
    def _nested(self) -> Self:
        """Whoever waits for somebody who waits must wait longer."""
        if not self.min_wait_s <= self.max_wait_s <= self.straggler_timeout_s < self.deadline_s:
            raise ValueError("min_wait_s, max_wait_s, straggler_timeout_s and deadline_s must grow in this order")
        return self
