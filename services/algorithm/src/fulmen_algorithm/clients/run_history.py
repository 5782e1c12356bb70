"""The history of runs at the store; see `runs.ports.RunHistory`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import run_history_service_pb2 as pb
from fulmen.store.v1.run_history_service_pb2_grpc import RunHistoryServiceStub
from fulmen.store.v1.run_lease_service_pb2 import RunFence as FenceMessage
from fulmen.type.v1.reward_distribution_pb2 import RewardDistribution as RewardsMessage
from fulmen_algorithm.runs.events import Event
from fulmen_algorithm.runs.ports import RunFence
from fulmen_algorithm.runs.rewards import RewardDistribution

__all__ = ["StoreRunHistory", "rewards_message"]

CALL_DEADLINE_S = 10.0


class StoreRunHistory:
    """Appends events of runs."""

    def __init__(self, channel: FulmenChannel) -> None:
        self._stub = RunHistoryServiceStub(channel)

    async def append(self, fence: RunFence, events: Sequence[Event], *, rollbacks: Mapping[int, int]) -> int:
        """Appends events under an epoch of a run; returns the sequence of its last event."""
        request = pb.AppendRunHistoryRequest(
            run_fence=FenceMessage(training_run=fence.training_run, epoch=fence.epoch),
            events=[_event(event, rollbacks) for event in events],
        )
        answer = await self._stub.AppendRunHistory(request, timeout=CALL_DEADLINE_S)
        return int(answer.last_sequence)


def rewards_message(rewards: RewardDistribution | None) -> RewardsMessage | None:
    """Encodes a distribution of rewards."""
    if rewards is None:
        return None
    return RewardsMessage(values=rewards.values, counts=rewards.counts, bin_width=rewards.bin_width)


def _event(event: Event, rollbacks: Mapping[int, int]) -> pb.RunHistoryEvent:
    message = pb.RunHistoryEvent(sequence=event.sequence)
    message.event_time.FromDatetime(event.time)
    if event.step is not None:
        message.step.step = event.step.step
        message.step.values.update(event.step.values)
        if (rewards := rewards_message(event.step.rewards)) is not None:
            message.step.rewards.CopyFrom(rewards)
    elif event.notice is not None:
        message.notice.severity, message.notice.message = event.notice.severity, event.notice.message
    else:
        message.rolled_back_to_step = rollbacks[event.sequence]
    return message
