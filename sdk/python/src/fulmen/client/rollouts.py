"""Rollouts, attempts and groups as records."""

from __future__ import annotations

import datetime
import json
from typing import Any, ClassVar

from fulmen.agent import FINAL_DIMENSION
from fulmen.client.view import View
from fulmen.ids import parse_attempt_name
from fulmen.messages import enum_word, moment
from fulmen.scores import final_reward
from fulmen.store.v1 import attempt_pb2, rollout_changes_pb2, rollout_pb2, rollout_selection_pb2, rollout_service_pb2

__all__ = ["FINAL_STATES", "Attempt", "Group", "Rollout", "RolloutChanges", "RolloutCount", "decoded"]

FINAL_STATES = frozenset({"succeeded", "failed", "cancelled"})
"""States of a rollout that never change."""


def decoded(content: bytes, content_type: str) -> Any:
    """Returns JSON as Python values and other text as text; bytes that are neither stay bytes."""
    try:
        return json.loads(content) if not content_type or "json" in content_type else content.decode()
    except ValueError:
        return content.decode(errors="replace") if content_type.startswith("text/") else content


class Attempt(View[attempt_pb2.Attempt]):
    """One execution of a rollout by one runner."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("number", "state", "reward")

    @property
    def name(self) -> str:
        """`projects/{project}/rollouts/{uuid}/attempts/{n}`."""
        return str(self.proto.name)

    @property
    def number(self) -> int:
        """Number of the attempt, from 1."""
        return parse_attempt_name(self.name).number

    @property
    def state(self) -> str:
        """`running`, `succeeded` or `failed`."""
        return enum_word(self.proto, "state")

    @property
    def failure(self) -> str:
        """Why it failed, such as `agent_error`; empty if it did not."""
        return enum_word(self.proto, "failure_kind")

    @property
    def failure_message(self) -> str:
        """A description of the failure, at most 4 KiB; empty if there is none."""
        return str(self.proto.failure_message)

    @property
    def output(self) -> Any:
        """Return value of the agent; None if there is none."""
        return decoded(self.proto.output, self.proto.output_content_type) if self.proto.output else None

    @property
    def rewards(self) -> dict[str, float]:
        """Rewards of the whole attempt by dimension, unitless; rewards of steps and spans are in `proto`."""
        return {
            each.dimension or FINAL_DIMENSION: each.value
            for each in self.proto.rewards
            if not each.HasField("step") and not each.span_id
        }

    @property
    def reward(self) -> float | None:
        """The final reward: the dimension `reward`, or the only dimension; None if there is none."""
        return final_reward({(dimension, None, b""): value for dimension, value in self.rewards.items()})

    @property
    def stdout(self) -> str:
        """End of its agent's standard output; empty unless it was requested and the runner kept it."""
        return str(self.proto.printed.stdout)

    @property
    def stderr(self) -> str:
        """End of its agent's standard error; empty unless it was requested and the runner kept it."""
        return str(self.proto.printed.stderr)

    @property
    def progress(self) -> tuple[float | None, str] | None:
        """Last progress reported by its agent: the share that is done (0 to 1, None if unknown) and a text; None if
        there is none."""
        if not self.proto.HasField("progress"):
            return None
        said = self.proto.progress
        return (said.fraction if said.HasField("fraction") else None), str(said.text)

    @property
    def start_time(self) -> datetime.datetime | None:
        """When its lease was granted, UTC."""
        return moment(self.proto.start_time)

    @property
    def end_time(self) -> datetime.datetime | None:
        """When it ended, UTC; None while it runs."""
        return moment(self.proto.end_time)

    @property
    def duration_s(self) -> float | None:
        """Duration, in seconds; None while it runs."""
        if self.start_time is None or self.end_time is None:
            return None
        return (self.end_time - self.start_time).total_seconds()


class Rollout(View[rollout_pb2.Rollout]):
    """One execution of an agent on one input."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("name", "state", "reward")

    @property
    def name(self) -> str:
        """`projects/{project}/rollouts/{uuid}`."""
        return str(self.proto.name)

    @property
    def id(self) -> str:
        """The UUID in its name."""
        return self.name.rpartition("/")[2]

    @property
    def state(self) -> str:
        """`queued`, `running`, `retry_wait`, `succeeded`, `failed` or `cancelled`."""
        return enum_word(self.proto, "state")

    @property
    def is_final(self) -> bool:
        """Whether its state is final."""
        return self.state in FINAL_STATES

    @property
    def failure(self) -> str:
        """Why it failed or was cancelled, such as `timeout`; empty if it did not."""
        return enum_word(self.proto, "failure_kind")

    @property
    def mode(self) -> str:
        """`train`, `validation` or `test`."""
        return enum_word(self.proto, "mode")

    @property
    def task(self) -> Any:
        """The agent's input; None in lists, which leave it out."""
        return decoded(self.proto.input, self.proto.input_content_type) if self.proto.input else None

    @property
    def agent(self) -> str:
        """Version of the agent, `resources/{id}/versions/{n}`; empty for the runner's own."""
        return str(self.proto.agent)

    @property
    def training_run(self) -> str:
        """`projects/{project}/trainingRuns/{id}`; empty if it belongs to none."""
        return str(self.proto.training_run)

    @property
    def group_id(self) -> str:
        """Id of its group; empty if it is alone."""
        return str(self.proto.group_id)

    @property
    def attempts(self) -> list[Attempt]:
        """Its latest 16 attempts, oldest first; empty in lists, which leave them out."""
        return [Attempt(each) for each in self.proto.attempts]

    @property
    def attempt(self) -> Attempt | None:
        """The attempt that decided its state; None if it is not decided or the attempts are left out."""
        return next((each for each in reversed(self.attempts) if each.proto.final), None)

    @property
    def reward(self) -> float | None:
        """The final reward of the deciding attempt; None if there is none or the attempts are left out."""
        return self.attempt.reward if self.attempt is not None else None

    @property
    def output(self) -> Any:
        """Return value of the agent in the deciding attempt; None if there is none."""
        return self.attempt.output if self.attempt is not None else None

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata that it was created with."""
        return dict(self.proto.metadata)

    @property
    def create_time(self) -> datetime.datetime | None:
        """When it was created, UTC."""
        return moment(self.proto.create_time)

    @property
    def retry_time(self) -> datetime.datetime | None:
        """When it may run again, UTC; None unless its state is `retry_wait`."""
        return moment(self.proto.retry_time)

    @property
    def end_time(self) -> datetime.datetime | None:
        """When it reached its final state, UTC; None before."""
        return moment(self.proto.end_time)


class RolloutCount(View[rollout_selection_pb2.CountRolloutsResponse]):
    """How many rollouts a filter selects."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("count", "has_more", "states")

    @property
    def count(self) -> int:
        """Number of rollouts."""
        return int(self.proto.count)

    @property
    def has_more(self) -> bool:
        """Whether there may be more: counting stopped after two seconds."""
        return bool(self.proto.has_more)

    @property
    def states(self) -> dict[str, int]:
        """Number of rollouts by state."""
        return self._summed("state")

    @property
    def failures(self) -> dict[str, int]:
        """Number of rollouts that failed or were cancelled, by the reason, such as `timeout`."""
        found = self._summed("failure_kind")
        found.pop("", None)
        return found

    @property
    def facets(self) -> dict[str, dict[str, int]]:
        """Number of rollouts by value, for each field: over the newest 10,000 rollouts, for maps over the newest 500; `proto` has
        whether there are more."""
        return {facet.field: {each.value: each.count for each in facet.values} for facet in self.proto.facets}

    def _summed(self, field: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for part in self.proto.parts:
            word = enum_word(part, field)
            found[word] = found.get(word, 0) + part.count
        return found


class RolloutChanges(View[rollout_changes_pb2.WatchRolloutChangesResponse]):
    """Rollouts that changed."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("rollouts",)

    @property
    def rollouts(self) -> list[Rollout]:
        """The rollouts in their current state, with their latest attempts; tasks and outputs are left out."""
        return [Rollout(each) for each in self.proto.rollouts]

    @property
    def cursor(self) -> str:
        """Position after these changes, from which a watch resumes."""
        return str(self.proto.cursor)


class Group(View[rollout_service_pb2.FinishedGroup]):
    """Rollouts of one group, all of them final."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("id", "rollouts")

    @property
    def id(self) -> str:
        """Id of the group, or the name of its only rollout."""
        return str(self.proto.group_id)

    @property
    def rollouts(self) -> list[Rollout]:
        """All members with their latest attempts, ordered by name."""
        return [Rollout(each) for each in self.proto.rollouts]

    @property
    def cursor(self) -> str:
        """Position after the group, from which a stream resumes."""
        return str(self.proto.cursor)
