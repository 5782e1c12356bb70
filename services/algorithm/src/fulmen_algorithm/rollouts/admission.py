"""How many groups may be under way: never so many that a row could be older than the staleness limit allows.

Source: the admission rule of AReaL (arXiv:2505.24298), eq. 3: accepted + running <= (eta + version + 1) * B.
"""


def groups_admitted(
    *, running: int, kept: int, version: int, groups_per_step: int, max_staleness: int, steps: int
) -> int:
    """Computes how many more groups may be submitted now.

    Every step that is done counts as B accepted groups, also one that found fewer; a dropped group is neither accepted
    nor running, and so is refilled. A run never asks for more than its steps can use.

    Args:
        running: Groups submitted and not dealt with yet, finished ones that wait included.
        kept: Groups accepted for the step that is being collected.
        version: Training steps done, which is the run's own count of policy versions.
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
    """Computes for how many of its groups a step needs no other: kept, or dropped with no look left for a refill.

    A refill that its own step cannot look at would wait behind the groups of later steps, and grow too old there.

    Args:
        kept: Groups accepted for the step.
        seen: Groups that the step has looked at, of those that count.
        groups_per_step: B.
        max_groups: Groups that a step looks at, at most; no less than B.
    """
    return max(kept, groups_per_step - (max_groups - seen))
