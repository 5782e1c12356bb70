"""Defaults by the size of the model: the learning rate, the length of answers and the number format of versions.

The larger the model, the smaller the steps that it bears, and the longer its answers. Between 1 and 500 million parameters the rate is interpolated on logarithmic scales; outside it is constant. The rates of
small models were measured (docs/learning.md); those of large ones are the defaults of TRL 1.0 and verl 0.8. Adapters
bear ten times the rate (Schulman et al., "LoRA Without Regret", 2025), up to that of small models (examples/two_roles).
"""

import math
from dataclasses import dataclass
from typing import Literal

SMALL, LARGE = 1e6, 5e8
"""Parameters at and below, and at and above which the rate is constant."""
ADAPTER_FACTOR, MAX_ADAPTER_RATE = 10.0, 3e-3
SMALL_TOKENS, LARGE_TOKENS = 64, 1024
"""Default length of an answer of small and of large models. TRL 1.0 has 256 and verl 0.8 has 512 for all."""
LARGE_FROM = 1e8
"""Parameters from which versions are published in bfloat16, in which engines compute on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What defaults depend on.

    Attributes:
        parameters: Number of the model's parameters, those of adapters aside; 0 if unknown, which counts as many.
        longest: Maximum number of tokens of a sequence; 0 if unknown.
    """

    parameters: int
    longest: int = 0

    @property
    def position(self) -> float:
        """Where the size is between small (0) and large (1), on a logarithmic scale."""
        size = min(max(self.parameters, SMALL), LARGE) if self.parameters else LARGE
        return math.log(size / SMALL) / math.log(LARGE / SMALL)

    def __str__(self) -> str:
        """Describes the size in a message."""
        return f"{self.parameters / 1e6:.3g} M parameters" if self.parameters else "a model of unknown size"

    @property
    def is_large(self) -> bool:
        """Whether it is known to be no toy: its answers are long, and its passes are worth a GPU's number format."""
        return self.parameters >= LARGE_FROM

    @property
    def answer_tokens(self) -> int:
        """Default length of the answer to one model call: a power of two, at most half of the longest sequence."""
        wanted = 2 ** round(math.log2(SMALL_TOKENS) + self.position * math.log2(LARGE_TOKENS / SMALL_TOKENS))
        return max(1, min(wanted, self.longest // 2)) if self.longest else wanted

    @property
    def published_as(self) -> Literal["float32", "bfloat16"]:
        """Default number format of published versions."""
        return "bfloat16" if self.is_large or not self.parameters else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBySize:
    """A learning rate by the size of the model.

    Attributes:
        small: Rate of models of 1 million parameters and fewer.
        large: Rate of models of 500 million parameters and more.
    """

    small: float
    large: float

    def of(self, parameters: int, *, adapters: bool = False) -> float:
        """Returns the rate, rounded to two digits.

        Args:
            parameters: Number of the model's parameters, those of adapters aside; 0 if unknown, which counts as many.
            adapters: Whether low-rank adapters are trained instead of all weights.
        """
        position = ModelFacts(parameters=parameters).position
        rate = self.small ** (1 - position) * self.large**position
        return float(f"{min(rate * ADAPTER_FACTOR, MAX_ADAPTER_RATE) if adapters else rate:.2g}")


REINFORCEMENT = RateBySize(small=3e-4, large=1e-6)
SUPERVISED = RateBySize(small=1e-3, large=2e-5)
CRITIC_RATE = RateBySize(small=1e-3, large=1e-5)
