"""Admission: limits the groups in flight to bound the staleness of rows.

Source: the admission rule of AReaL (arXiv:2505.24298), eq. 3: accepted + running <= (eta + version + 1) * B.
"""


def groups_admitted(
    *, running: int, kept: int, version: int, groups_per_step: int, max_staleness: int, steps: int
) -> int:
    """Computes how many more groups may be submitted now.

    Every completed step counts as B accepted groups, even if it had fewer. A dropped group is neither accepted nor
    running, and so is refilled. A run never requests more groups than its steps can use.

    Args:
        running: Groups submitted but not consumed, including finished ones that wait.
        kept: Groups accepted for the step being collected.
        version: Training steps done; the run's own count of policy versions.
        groups_per_step: B, groups of one training step, at least 1.
        max_staleness: eta, training steps that a group may lag; 0 is fully synchronous.
        steps: Training steps of the whole run.

    Returns:
        A number of groups, 0 or more.
    """
    accepted = version * groups_per_step + kept
    allowed = min(max_staleness + version + 1, steps) * groups_per_step
    return max(0, allowed - accepted - running)


def groups_settled(*, kept: int, seen: int, groups_per_step: int, max_groups: int) -> int:
    """Computes how many of a step's groups need no refill: kept, or dropped with no room to consider a refill.

    A refill that its own step cannot consider would wait behind the groups of later steps and become too stale.

    Args:
        kept: Groups accepted for the step.
        seen: Groups considered by the step, of those that count.
        groups_per_step: B.
        max_groups: Maximum number of groups considered by a step; at least B.
    """
    return max(kept, groups_per_step - (max_groups - seen))
