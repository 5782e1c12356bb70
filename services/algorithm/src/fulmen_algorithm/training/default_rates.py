"""Default learning rates by the size of the model: the larger the model, the smaller the steps that it bears.

Between 1 and 500 million parameters the rate is interpolated on logarithmic scales; outside it is constant. The rates of
small models were measured (docs/learning.md); those of large ones are the defaults of TRL 1.0 and verl 0.8. Adapters
bear ten times the rate (Schulman et al., "LoRA Without Regret", 2025), up to that of small models (examples/two_roles).
"""

import math
from dataclasses import dataclass

SMALL, LARGE = 1e6, 5e8
"""Parameters at and below, and at and above which the rate is constant."""
ADAPTER_FACTOR, MAX_ADAPTER_RATE = 10.0, 3e-3


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
        size = min(max(parameters, SMALL), LARGE) if parameters else LARGE
        position = math.log(size / SMALL) / math.log(LARGE / SMALL)
        rate = self.small ** (1 - position) * self.large**position
        return float(f"{min(rate * ADAPTER_FACTOR, MAX_ADAPTER_RATE) if adapters else rate:.2g}")


REINFORCEMENT = RateBySize(small=3e-4, large=1e-6)
SUPERVISED = RateBySize(small=1e-3, large=2e-5)
CRITIC_RATE = RateBySize(small=1e-3, large=1e-5)
