"""A project's queue rules, weight and quotas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["DEFAULT_RULES", "DEFAULT_TERMS", "DEFAULT_WEIGHT", "QueueRules", "QueueTerms"]

DEFAULT_AGEING_INTERVAL_S: Final = 60.0
DEFAULT_WEIGHT: Final = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """Rules of a project; see docs/queue-rules.md.

    Attributes:
        ageing_interval_s: Time after which a waiting rollout counts as one priority higher, seconds; 0 is off.
        match_labels: Whether a rollout is assigned only to runners that have its labels.
        affinity: Whether a waiting runner that last ran the same group or agent version is preferred.
        longest_first: Whether the members of a group with the longest predicted duration go first.
        hedging: Whether rollouts that request it are hedged.
        weighted_share: Whether the project's weight counts; otherwise the weight is 100.
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
    """A project's weight, quotas and rules.

    Attributes:
        weight: Share of the runners relative to other projects.
        max_running: Maximum number of running rollouts; None means unlimited.
        max_queued: Maximum number of waiting rollouts; None means unlimited.
        rules: Queue rules.
        paused_agents: Numbers of the agent versions of which no rollout is leased.
        is_paused: Whether no rollout of the project is leased.
        order_revision: Grows when the priority of a live rollout changes.
    """

    weight: float = DEFAULT_WEIGHT
    max_running: int | None = None
    max_queued: int | None = None
    rules: QueueRules = DEFAULT_RULES
    paused_agents: frozenset[int] = frozenset()
    is_paused: bool = False
    order_revision: int = 0

    @property
    def share(self) -> float:
        """Effective weight."""
        return self.weight if self.rules.weighted_share else DEFAULT_WEIGHT


DEFAULT_TERMS: Final = QueueTerms()
