"""Settings of the exchange of gradients. No torch is needed to read them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fulmen_algorithm.training.strict import Strict


class TorchLinkSettings(Strict):
    """Ranks of one cluster, through `torch.distributed`: NCCL on GPUs, Gloo on CPUs."""

    kind: Literal["torch"] = "torch"


LinkSettings = Annotated[TorchLinkSettings, Field(discriminator="kind")]


class CodecSettings(Strict):
    """What the settings of every codec have in common; each adds its own, and its name in `codec`.

    Attributes:
        link: What carries the payloads.
        dense: Patterns of parameter names (`fnmatch`) that are summed as they are; vectors always are.
        dense_below: So are parameters with fewer elements.
        check_every: Rounds between comparisons of all ranks' weights; 0 for never.
        full_sync_every: Rounds between those in which all that was kept back is sent; 0 for never.
    """

    link: LinkSettings = TorchLinkSettings()
    dense: tuple[str, ...] = ()
    dense_below: int = Field(default=4096, ge=1)
    check_every: int = Field(default=100, ge=0)
    full_sync_every: int = Field(default=0, ge=0)
