"""The queue and the usage of a project as records."""

from __future__ import annotations

import datetime
from typing import ClassVar

from fulmen.client.view import View
from fulmen.messages import moment, seconds
from fulmen.store.v1 import rollout_service_pb2, usage_service_pb2

__all__ = ["QueueStats", "Usage"]

MICROS_PER_DOLLAR = 1e6


class QueueStats(View[rollout_service_pb2.GetQueueStatsResponse]):
    """Numbers of queued and running rollouts."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("queued_count", "running_count", "delayed_count", "runner_count")

    @property
    def queued_count(self) -> int:
        """Number of rollouts that wait for a runner."""
        return int(self.proto.queued_count)

    @property
    def running_count(self) -> int:
        """Number of rollouts that run."""
        return int(self.proto.running_count)

    @property
    def delayed_count(self) -> int:
        """Number of rollouts that wait for their back-off or `not_before_time`."""
        return int(self.proto.delayed_count)

    @property
    def oldest_queued_age_s(self) -> float | None:
        """How long the oldest queued rollout has waited, in seconds; None if none waits."""
        return seconds(self.proto.oldest_queued_age) if self.proto.HasField("oldest_queued_age") else None

    @property
    def runner_count(self) -> int:
        """Number of live runners."""
        return int(self.proto.runner_count)

    @property
    def pause_time(self) -> datetime.datetime | None:
        """When the queue was paused, UTC; None if it is not."""
        return moment(self.proto.pause_time)

    @property
    def pause_reason(self) -> str:
        """Why it was paused; empty if no reason was given."""
        return str(self.proto.pause_reason)

    @property
    def paused_agents(self) -> list[str]:
        """Agent versions that are paused because several runners were lost while they ran them."""
        return [each.agent for each in self.proto.paused_agents]


class Usage(View[usage_service_pb2.UsageGroup]):
    """Usage of model calls of one group."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = (
        "name",
        "call_count",
        "prompt_token_count",
        "completion_token_count",
        "cost_usd",
    )

    @property
    def name(self) -> str:
        """Name of the group: a model, a backend, a run, a rollout or an attempt; empty for the sum of all."""
        return str(self.proto.name)

    @property
    def call_count(self) -> int:
        """Number of calls that ended, including failed ones."""
        return int(self.proto.usage.request_count)

    @property
    def failure_count(self) -> int:
        """Number of calls that failed."""
        return int(self.proto.usage.failure_count)

    @property
    def prompt_token_count(self) -> int:
        """Tokens of prompts."""
        return int(self.proto.usage.prompt_token_count)

    @property
    def cached_token_count(self) -> int:
        """Tokens of prompts that the backend had in its cache."""
        return int(self.proto.usage.cached_token_count)

    @property
    def completion_token_count(self) -> int:
        """Sampled tokens."""
        return int(self.proto.usage.completion_token_count)

    @property
    def cost_usd(self) -> float:
        """Cost by the proxy's price table, US dollars; 0 without a price."""
        return float(self.proto.usage.cost_micros) / MICROS_PER_DOLLAR
