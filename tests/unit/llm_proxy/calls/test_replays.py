"""Captures of lost attempts take bounded memory, whoever waits for them and however many are read at once."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from prometheus_client import CollectorRegistry

from fulmen.rpc.channel import open_channel
from fulmen_llm_proxy.attempts.caller import Attribution
from fulmen_llm_proxy.calls.replay.captured_calls import CallSequence, CapturedCall
from fulmen_llm_proxy.calls.replay.lost_attempts import READERS, LostAttempts
from fulmen_llm_proxy.calls.replay.replays import Replays
from fulmen_llm_proxy.metrics.replays import ReplayMetrics
from fulmen_service_kit.security.call_terms import CallTerms
from tests.support.llm_proxy.fake_store import FakeStore

CALL = cast(Any, SimpleNamespace(request=SimpleNamespace(api=SimpleNamespace(generates=True), model="m")))


def second_attempt(number: int) -> Attribution:
    """Returns the attempt of a rollout whose first one was lost."""
    attempt = f"projects/default/rollouts/01890000-0000-7000-8000-{number:012}/attempts/2"
    return Attribution(attempt=attempt, project="projects/default", epoch=2, mode="train", terms=CallTerms(continues=1))


class SlowStore:
    """Stands for what reads lost attempts: each has one call of 1000 bytes."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.read_count = 0

    async def read(self, attribution: Attribution) -> CallSequence:
        """Returns the calls once the store answers."""
        await self.answers.wait()
        self.read_count += 1
        call = CapturedCall(span_id="1", digest=b"", policy="", was_seen=True, choices={}, size_bytes=1000)
        return CallSequence([call])


async def test_captures_whose_caller_has_left_count_and_make_room() -> None:
    lost = SlowStore()
    replays = Replays(
        lost=cast(LostAttempts, lost),
        planner=cast(Any, None),
        is_alone=lambda: True,
        metrics=ReplayMetrics(CollectorRegistry()),
        max_bytes=2500,
    )
    asking = [asyncio.create_task(replays.find(CALL, second_attempt(number))) for number in range(5)]
    await asyncio.sleep(0)
    for each in asking:
        each.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    lost.answers.set()
    async with asyncio.timeout(10):
        while lost.read_count < len(asking) or not replays.size_bytes:  # noqa: ASYNC110  # of other tasks
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert replays.size_bytes == 2000


class Settlement:
    """Stands for what waits until the store has all captures; counts who waits at once."""

    def __init__(self) -> None:
        self.settles = asyncio.Event()
        self.waiting = self.most = 0

    async def settled(self, attempts: object, totals: object) -> None:
        """Waits until all are settled."""
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await self.settles.wait()
        self.waiting -= 1


async def test_only_some_lost_attempts_are_read_at_a_time_and_the_others_afterwards() -> None:
    settlement = Settlement()
    async with FakeStore() as store, open_channel(store.target, token=None) as channel:
        lost = LostAttempts(channel=channel, settlement=cast(Any, settlement), max_bytes=1000)
        reading = [asyncio.create_task(lost.read(second_attempt(number))) for number in range(3 * READERS)]
        while settlement.waiting < READERS:  # noqa: ASYNC110  # of other tasks
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        settlement.settles.set()
        found = await asyncio.gather(*reading)
    assert settlement.most == READERS
    assert all(each.is_over for each in found)
