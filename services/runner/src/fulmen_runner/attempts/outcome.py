"""The outcome of an attempt, as a value.

Invariant: a failure has no rewards, so a failed attempt is never trained on as a success.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from fulmen.agent import FINAL_DIMENSION

MAX_MESSAGE_BYTES = 4096
MAX_OUTPUT_BYTES = 65_536


class FailureKind(StrEnum):
    """Why an attempt failed; the names match the contract's."""

    AGENT_ERROR = "AGENT_ERROR"
    TIMEOUT = "TIMEOUT"
    INFRA = "INFRA"
    REWARD_MISSING = "REWARD_MISSING"
    CANCELLED = "CANCELLED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A finite reward of one dimension; without step and span id (eight bytes), of the whole attempt."""

    dimension: str = FINAL_DIMENSION
    value: float
    step: int | None = None
    span_id: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The agent's return value, encoded; at most `MAX_OUTPUT_BYTES`."""

    content: bytes = b""
    content_type: str = ""


NO_OUTPUT = Output()


@dataclass(frozen=True, slots=True, kw_only=True)
class Printed:
    """The end of what the agent printed, without secrets."""

    stdout: str = field(default="", repr=False)
    stderr: str = field(default="", repr=False)


NOTHING_PRINTED = Printed()


@dataclass(frozen=True, slots=True, kw_only=True)
class Succeeded:
    """The attempt succeeded and has at least one reward."""

    rewards: tuple[Reward, ...]
    output: Output = NO_OUTPUT
    printed: Printed = NOTHING_PRINTED


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The attempt failed; `message` has the reason and contains no secret."""

    kind: FailureKind
    message: str
    output: Output = NO_OUTPUT
    printed: Printed = NOTHING_PRINTED


Outcome = Succeeded | Failed


def cut_at_front(text: str, limit_bytes: int = MAX_MESSAGE_BYTES) -> str:
    """Returns the last `limit_bytes` of a text, counted in UTF-8.

    Half of a surrogate pair, which a text from JSON may hold and no message takes, becomes `?`.
    """
    encoded = text.encode(errors="replace")
    return encoded[max(0, len(encoded) - limit_bytes) :].decode(errors="ignore")
