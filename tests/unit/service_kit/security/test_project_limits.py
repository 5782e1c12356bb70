"""Limits of a project's calls."""

from __future__ import annotations

import asyncio

import pytest

from fulmen.errors import QuotaExceeded
from fulmen.ids import ALL_PROJECTS
from fulmen_service_kit.security import refusals
from fulmen_service_kit.security.project_limits import BYTES_PER_UNIT, ProjectLimits
from fulmen_service_kit.security.tokens import Caller, Role
from tests.support.clock import Clock

ANN, BOB = (Caller(role=Role.CLIENT, project=f"projects/{name}") for name in ("ann", "bob"))
SERVICE = Caller(role=Role.SERVICE, project=ALL_PROJECTS)


@pytest.fixture(autouse=True)
def no_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "HOLD_S", 0)
    monkeypatch.setattr(refusals, "SPACING_S", 0)


async def test_a_project_has_its_burst_and_then_its_rate() -> None:
    clock = Clock()
    limits = ProjectLimits(calls_per_s=10, burst=3, clock=clock)
    for _ in range(3):
        (await limits.admit(ANN)).end()
    with pytest.raises(QuotaExceeded) as refused:
        await limits.admit(ANN)
    assert refused.value.metadata == {"project": "projects/ann", "quota": "project_rate"}
    assert refused.value.retry_after_s == pytest.approx(0.1)
    (await limits.admit(BOB)).end()
    clock.now_s = 0.1
    (await limits.admit(ANN)).end()
    with pytest.raises(QuotaExceeded):
        await limits.admit(ANN)


async def test_bytes_and_messages_count_and_may_leave_a_debt() -> None:
    clock = Clock()
    limits = ProjectLimits(calls_per_s=1, burst=10, clock=clock)
    share = await limits.admit(ANN)
    share.charge(20 * BYTES_PER_UNIT, messages=1)
    assert share.left == -12
    with pytest.raises(QuotaExceeded) as refused:
        await limits.admit(ANN)
    assert refused.value.retry_after_s == 13
    clock.now_s = 12
    await share.pace()
    assert share.left == 0


@pytest.mark.parametrize("is_stream", [False, True])
async def test_calls_and_streams_that_are_open_at_the_same_time_are_counted_apart(is_stream: bool) -> None:
    limits = ProjectLimits(max_calls=2, max_streams=2)
    shares = [await limits.admit(ANN, is_stream=is_stream) for _ in range(2)]
    with pytest.raises(QuotaExceeded):
        await limits.admit(ANN, is_stream=is_stream)
    await limits.admit(ANN, is_stream=not is_stream)
    await limits.admit(BOB, is_stream=is_stream)
    shares[0].end(is_stream=is_stream)
    await limits.admit(ANN, is_stream=is_stream)


async def test_a_call_whose_caller_leaves_before_its_turn_is_no_longer_open() -> None:
    limits = ProjectLimits(max_calls=4)
    (await limits.admit(BOB)).end()
    share = await limits.admit(ANN)
    waiting = [asyncio.create_task(limits.admit(ANN)) for _ in range(3)]
    await asyncio.sleep(0)
    assert share.calls == 4
    waiting[-1].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert share.calls == 3


async def test_services_bulk_rpcs_and_a_limit_of_zero_are_not_limited() -> None:
    limits = ProjectLimits(calls_per_s=1, burst=1, max_calls=1)
    for _ in range(5):
        await limits.admit(SERVICE)
        await limits.admit(ANN, is_counted=False)
    free = ProjectLimits()
    for _ in range(5):
        share = await free.admit(ANN)
        share.charge(10**9)
        await share.pace()


async def test_the_table_keeps_its_size_and_forgets_no_project_with_open_calls() -> None:
    limits = ProjectLimits(calls_per_s=1, burst=1, max_projects=2, clock=Clock())
    await limits.admit(ANN)
    for number in range(5):
        with await limits.admit(Caller(role=Role.CLIENT, project=f"projects/p{number}")):
            pass
    with pytest.raises(QuotaExceeded):
        await limits.admit(ANN)


async def test_refusals_are_held_back_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "HOLD_S", 3600)
    monkeypatch.setattr(refusals, "MAX_HELD", 2)
    limits = ProjectLimits(max_calls=1)
    await limits.admit(ANN)
    held = [asyncio.create_task(limits.admit(ANN)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QuotaExceeded):
        await limits.admit(ANN)
    assert not any(task.done() for task in held)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
