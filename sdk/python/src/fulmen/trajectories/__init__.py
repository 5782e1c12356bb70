"""Turns the captured model calls of an attempt into training rows, by token id. No tensors, no tokenizer.

Invariant: every token of a usable call that is not dropped is in exactly one row's response as a sampled token;
`loss_mask` is true on sampled tokens only. Consecutive calls of one agent are merged into one row if and only if the
next prompt begins, token by token, with all tokens of the row; the tokens it adds are masked. Text is never tokenised
again.

Source: the re-tokenisation drift described in https://blog.vllm.ai/2025/10/22/agent-lightning.html.
"""

from fulmen.trajectories.calls import DroppedCall, DropReason
from fulmen.trajectories.chat import Messages, is_constrained
from fulmen.trajectories.credit import (
    CreditedRow,
    CreditOption,
    Credits,
    CreditSettings,
    CreditSettingsInvalid,
    UnitRewards,
    assign_credit,
    call_units,
    unit_rewards,
)
from fulmen.trajectories.reading import MAX_BATCH_BYTES, AttemptSpans, read_attempt, read_calls
from fulmen.trajectories.rewards import (
    AttemptReward,
    RewardRange,
    ScoredRow,
    ScoredTrajectory,
    Unattached,
    UnattachedReason,
    attach,
    read_rewards,
)
from fulmen.trajectories.roles import SpanTree
from fulmen.trajectories.rows import BreakReason, Row, RowCall, why_broken
from fulmen.trajectories.trajectory import Trajectory, assemble, trajectories, trajectory
from fulmen.trajectories.views import Conversation, Triplet, conversations, transcript, triplets

__all__ = [
    "Conversation",
    "is_constrained",
    "Triplet",
    "conversations",
    "transcript",
    "triplets",
    "DropReason",
    "DroppedCall",
    "CreditedRow",
    "CreditOption",
    "Credits",
    "CreditSettings",
    "CreditSettingsInvalid",
    "UnitRewards",
    "assign_credit",
    "call_units",
    "unit_rewards",
    "MAX_BATCH_BYTES",
    "AttemptSpans",
    "read_attempt",
    "read_calls",
    "AttemptReward",
    "RewardRange",
    "ScoredRow",
    "ScoredTrajectory",
    "Unattached",
    "UnattachedReason",
    "attach",
    "read_rewards",
    "SpanTree",
    "Messages",
    "BreakReason",
    "Row",
    "RowCall",
    "why_broken",
    "Trajectory",
    "assemble",
    "trajectories",
    "trajectory",
]
