"""How forward and backward passes are computed, and what a machine can compute. Importable without torch."""

import shutil
from collections.abc import Sequence
from enum import StrEnum
from importlib.util import find_spec
from typing import Annotated

from pydantic import Field

from fulmen_algorithm.training.strict import Strict

COMPILERS = ("g++", "clang++")
MIB = 2**20


class Attention(StrEnum):
    """Implementation of attention, under the name that `transformers` gives it."""

    AUTO = "auto"
    EAGER = "eager"
    SDPA = "sdpa"
    FLASH = "flash_attention_2"
    FLEX = "flex_attention"


class PassSettings(Strict):
    """How passes are computed; results are equal up to rounding.

    Attributes:
        attention: `auto` is `sdpa`, or `eager` for a model without it. `flash_attention_2` (of variable lengths on packed
            rows) needs a GPU and the package flash-attn; `flex_attention` needs a GPU.
        compile: Compiles each layer with `torch.compile`; the first step takes a minute or more.
        offload: Keeps activations of 1 MiB or more in CPU memory between the passes; needs a GPU.
    """

    attention: Annotated[Attention, Field(strict=False)] = Attention.AUTO
    compile: bool = False
    offload: bool = False

    @property
    def described(self) -> str:
        """What differs from the defaults, as a list for people; empty if nothing does."""
        named = [f"attention {self.attention}"] if self.attention is not Attention.AUTO else []
        named += ["compiled layers"] if self.compile else []
        return ", ".join([*named, *(["offloaded activations"] if self.offload else [])])


def pass_problems(settings: PassSettings, device: str) -> Sequence[str]:
    """Returns why a service whose trainers are on `device`, `cpu` or `cuda`, cannot compute passes so."""
    found = []
    on_gpu = device.startswith("cuda")
    if settings.attention in (Attention.FLASH, Attention.FLEX) and not on_gpu:
        found.append(f"passes.attention: {settings.attention} needs a GPU to train: choose sdpa, or device cuda")
    if settings.attention is Attention.FLASH and on_gpu and find_spec("flash_attn") is None:
        found.append("passes.attention: flash_attention_2 needs the package flash-attn where the service runs")
    if settings.compile and not on_gpu and not any(map(shutil.which, COMPILERS)):
        found.append("passes.compile: needs a C++ compiler where the service runs: install g++ or clang++")
    if settings.offload and not on_gpu:
        found.append("passes.offload: needs a GPU: on a CPU there is no other memory")
    return found
