"""How many groups may be under way: never so many that a row could be older than the staleness limit allows.

Source: the admission rule of AReaL (arXiv:2505.24298), eq. 3: accepted + running <= (eta + version + 1) * B.
"""


def groups_admitted(
    *, submitted: int, dropped: int, version: int, groups_per_step: int, max_staleness: int, steps: int
) -> int:
    """Computes how many more groups may be submitted now.

    A submitted group is running, accepted (trained or waiting to be) or dropped, so accepted + running is
    submitted - dropped; a dropped group is thereby refilled. A run never asks for more than its steps can use.

    Args:
        submitted: Groups submitted since the run began.
        dropped: Groups that were finished and given up.
        version: Training steps done, which is the run's own count of policy versions.
        groups_per_step: B, groups of one training step, at least 1.
        max_staleness: eta, training steps that a group may lag; 0 is fully synchronous.
        steps: Training steps of the whole run.

    Returns:
        A number of groups, 0 or more.
    """
    allowed = min(max_staleness + version + 1, steps) * groups_per_step
    return max(0, allowed - (submitted - dropped))
