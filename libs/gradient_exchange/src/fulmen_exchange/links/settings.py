"""Settings of links, and what a link needs to call its servers. No torch is needed to read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fulmen.rpc.tls import TlsFiles
from fulmen_exchange.strict import Strict

RatioFactor = Annotated[float, Field(gt=0, le=64)]


class TorchLinkSettings(Strict):
    """Ranks of one cluster, over `torch.distributed`: NCCL on GPUs, Gloo on CPUs.

    Attributes:
        ratio_factor: This rank's ratio divided by the run's, for ranks with different networks; only for codecs with a ratio.
    """

    kind: Literal["torch"] = "torch"
    ratio_factor: RatioFactor = 1.0

    @property
    def targets(self) -> tuple[str, ...]:
        """Always empty: no servers are needed."""
        return ()

    @property
    def addresses(self) -> dict[str, str]:
        """See `GrpcLinkSettings.addresses`."""
        return {}


class GrpcLinkSettings(Strict):
    """Ranks of several sites, over shards of the sum on servers.

    Attributes:
        ratio_factor: This rank's ratio divided by the run's, for ranks with different networks; only for codecs with a ratio.
        targets: Addresses, `host:port`, one per shard; an address may repeat.
        spares: Addresses of servers that replace a lost one. All servers of `targets` and `spares` store their sums in one shared
            folder.
        quorum: Share of ranks whose payloads make a sum once the straggler deadline has passed; 1 waits for all. Uncompressed
            tensors always wait for all.
        min_wait_s: Shortest straggler deadline, in seconds after the first chunk.
        max_wait_s: Longest straggler deadline.
        straggler_timeout_s: A rank that delays a sum for this long is removed.
        lease_s: A rank that is silent for this long is removed.
        deadline_s: Timeout of a sum, including restarts of shards, before the run fails.
        piece_bytes: Largest piece of an uncompressed tensor; the first and the last have a quarter of it. Small pieces overlap
            transfer in both directions, large ones need less CPU time.
    """

    kind: Literal["grpc"] = "grpc"
    ratio_factor: RatioFactor = 1.0
    targets: tuple[str, ...] = Field(min_length=1, max_length=4096, strict=False)
    spares: tuple[str, ...] = Field(default=(), max_length=16, strict=False)
    quorum: float = Field(default=1.0, gt=0, le=1)
    min_wait_s: float = Field(default=0.2, gt=0)
    max_wait_s: float = Field(default=30.0, gt=0)
    straggler_timeout_s: float = Field(default=300.0, gt=0, le=86_400)
    lease_s: float = Field(default=15.0, ge=0.1, le=3600)
    deadline_s: float = Field(default=900.0, gt=0)
    piece_bytes: int = Field(default=2**22, ge=2**16, le=2**28)

    @model_validator(mode="after")
    def _nested(self) -> Self:
        """Checks that outer timeouts are longer than inner ones."""
        if not self.min_wait_s <= self.max_wait_s <= self.straggler_timeout_s < self.deadline_s:
            raise ValueError("min_wait_s, max_wait_s, straggler_timeout_s and deadline_s must be in ascending order")
        return self

    @property
    def addresses(self) -> dict[str, str]:
        """All addresses that ranks may call, by the name of their setting."""
        named = {"targets": self.targets, "spares": self.spares}
        return {f"{name}.{index}": address for name, each in named.items() for index, address in enumerate(each)}


LinkSettings = Annotated[TorchLinkSettings | GrpcLinkSettings, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """Credentials for the servers of shards.

    Attributes:
        training_run: `projects/{project}/trainingRuns/{id}`, which identifies the exchange.
        token: Token of role `service`, bound to the run's project; empty for servers without authentication.
        token_file: File with the token, read again when it changes; empty for `token`.
        tls: Certificates by address; None for no TLS.
    """

    training_run: str
    token: str = field(default="", repr=False)
    token_file: str = ""
    tls: Mapping[str, TlsFiles | None] = field(default_factory=dict)
