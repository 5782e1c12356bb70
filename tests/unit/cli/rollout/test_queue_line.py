"""The line of `fulmen queue --watch`."""

from __future__ import annotations

from fulmen.store.v1 import queue_service_pb2 as pb
from fulmen.store.v1 import rollout_service_pb2
from fulmen_cli.rollout.backlog import queue_line


def test_a_watched_queue_is_one_line_of_counts() -> None:
    stats = rollout_service_pb2.GetQueueStatsResponse(queued_count=3, running_count=2, runner_count=1)
    assert queue_line(pb.WatchQueueStatsResponse(stats=stats)) == "3 queued, 2 running, 0 delayed, 1 runners"


def test_the_line_says_what_waits_for_labels_and_that_the_queue_is_paused() -> None:
    message = pb.WatchQueueStatsResponse(stats=rollout_service_pb2.GetQueueStatsResponse(queued_count=5))
    message.stats.pause_time.GetCurrentTime()
    message.backlog.add(labels={"zone": "a", "gpu": "h200"}, queued_count=4)
    message.backlog.add(queued_count=1)
    message.stats.unmatched.add(labels={"gpu": "h200"}, queued_count=4)
    assert queue_line(message).endswith("paused, gpu=h200 zone=a: 4 queued, no runner has gpu=h200")
