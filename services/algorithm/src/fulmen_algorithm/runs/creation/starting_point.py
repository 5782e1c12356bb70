"""The checkpoint from which a run resumes: its newest, or the target of a rollback.

Reading a checkpoint whole takes minutes where it is large. So it is done here, once for each start, and of the one
checkpoint that is needed; more are read only where that one is damaged.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fulmen_algorithm.persistence.checkpoints import Checkpoint, CheckpointDamaged, CheckpointStore, Damage, Search
from fulmen_algorithm.runs.failure import RunFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """A verified checkpoint.

    Attributes:
        checkpoint: Checkpoint to resume from; None at the beginning.
        damaged: Newer damaged ones, which were skipped.
        begins_branch: Whether the run was rolled back to the checkpoint and its new branch has not begun.
    """

    checkpoint: Checkpoint | None = None
    damaged: tuple[Damage, ...] = ()
    begins_branch: bool = False


def starting_point(checkpoints: CheckpointStore, branch_points: Sequence[int]) -> StartingPoint:
    """Finds the checkpoint from which a run resumes; blocks while the checkpoint is read.

    Args:
        checkpoints: The run's checkpoints.
        branch_points: Sequences of the checkpoints that the run was rolled back to.

    Raises:
        RunFailed: if the checkpoint that the run was rolled back to is missing or damaged.
    """
    newest = checkpoints.listed()[-1:]
    if newest and branch_of(newest[0]) < len(branch_points):
        search = Search(checkpoint=newest[0], damaged=())
    else:
        search = checkpoints.newest()
    found = search.checkpoint
    if (0 if found is None else branch_of(found)) == len(branch_points):
        return StartingPoint(checkpoint=found, damaged=search.damaged)
    try:
        point = checkpoints.get(branch_points[-1])
    except CheckpointDamaged as error:
        raise RunFailed(f"Checkpoint {branch_points[-1]} can no longer be read.") from error
    return StartingPoint(checkpoint=point, damaged=search.damaged, begins_branch=True)


def branch_of(checkpoint: Checkpoint) -> int:
    """Returns the number of rollbacks before a checkpoint was written."""
    return int(checkpoint.progress.get("branch", 0))
