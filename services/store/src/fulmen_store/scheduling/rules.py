"""The rules by which a project's rollouts are handed out, and its share and quotas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["DEFAULT_RULES", "DEFAULT_TERMS", "DEFAULT_WEIGHT", "QueueRules", "QueueTerms"]

DEFAULT_AGEING_INTERVAL_S: Final = 60.0
DEFAULT_WEIGHT: Final = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """Rules that a project can switch; described in docs/queue-rules.md.

    Attributes:
        ageing_interval_s: A waiting rollout counts as one priority higher for each such interval; 0 is off.
        match_labels: Whether a rollout goes only to runners that have its labels.
        affinity: Whether, among waiting runners, one that ran the same group or agent last goes first.
        longest_first: Whether the members of a group that are predicted to take longest go first.
        hedging: Whether rollouts that request it are hedged.
        weighted_share: Whether the project's weight counts; otherwise it counts as 100.
    """

    ageing_interval_s: float = DEFAULT_AGEING_INTERVAL_S
    match_labels: bool = True
    affinity: bool = True
    longest_first: bool = True
    hedging: bool = False
    weighted_share: bool = True


DEFAULT_RULES: Final = QueueRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueTerms:
    """A project's place against others: its weight, its quotas and its rules.

    Attributes:
        weight: Its share.
        max_running: Maximum number of running rollouts; None: unlimited.
        max_queued: Maximum number of waiting rollouts; None: unlimited.
        rules: How its rollouts are handed out.
    """

    weight: float = DEFAULT_WEIGHT
    max_running: int | None = None
    max_queued: int | None = None
    rules: QueueRules = DEFAULT_RULES

    @property
    def share(self) -> float:
        """The weight that counts."""
        return self.weight if self.rules.weighted_share else DEFAULT_WEIGHT


DEFAULT_TERMS: Final = QueueTerms()
