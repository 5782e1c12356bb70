"""Adapts the weight of the entropy to a target, one step of the run after another; see `EntropyTarget`.

The coefficient and the last entropy are in `progress.memory`, so a resumed run continues with them.
"""

from collections.abc import Mapping

from fulmen_algorithm.losses.entropy_settings import EntropyBonus, EntropySettings, EntropyTarget, NoEntropyBonus
from fulmen_algorithm.runs.context import RunContext

ENTROPY = "entropy"
"""Metric of a step: mean entropy of its trained tokens, in nats."""
COEFFICIENT = "entropy_coefficient"
_LAST = "last_entropy"


def present_bonus(ctx: RunContext, settings: EntropySettings) -> EntropySettings:
    """Returns the bonus of the present step: for a target, the one that its coefficient and the last entropy give."""
    if not isinstance(settings, EntropyTarget):
        return settings
    coefficient, last = ctx.progress.memory.get(COEFFICIENT, 0.0), ctx.progress.memory.get(_LAST)
    if last is None or last > settings.target or not coefficient:
        return NoEntropyBonus()
    return EntropyBonus(coefficient=coefficient)


def adapt_bonus(ctx: RunContext, settings: EntropySettings, metrics: Mapping[str, float]) -> dict[str, float]:
    """Takes in the entropy of a step that was committed; returns the coefficient that the step had, for a target."""
    if not isinstance(settings, EntropyTarget):
        return {}
    used = present_bonus(ctx, settings)
    if (entropy := metrics.get(ENTROPY)) is not None:
        coefficient = adapted(ctx.progress.memory.get(COEFFICIENT, 0.0), entropy, settings)
        ctx.recorder.remember(**{COEFFICIENT: coefficient, _LAST: entropy})
    return {COEFFICIENT: used.coefficient if isinstance(used, EntropyBonus) else 0.0}


def adapted(coefficient: float, entropy: float, settings: EntropyTarget) -> float:
    """Returns c_(k+1): c_k + step if the entropy is at most the target, else c_k - step, within 0 and the maximum."""
    change = settings.step if entropy <= settings.target else -settings.step
    return min(max(coefficient + change, 0.0), settings.max)
