"""Creation is all or none and happens once, whoever else creates the same at the same moment."""

from __future__ import annotations

import asyncio

import pytest

from fulmen.errors import ArgumentInvalid, FulmenError, RolloutExists, RolloutNotFound
from fulmen.ids import DEFAULT_PROJECT, rollout_name, uuid7
from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_store.resources.lifetimes import ExpiringVersions
from tests.support.store.rollouts import moment
from tests.support.store.running import Stubs, create, get, queue_stats, running_store, until_queued

ROUNDS = 12


async def test_of_racing_creations_of_one_name_the_loser_leaves_nothing(database_url: str) -> None:
    async with running_store(database_url) as one, running_store(database_url) as two:
        replicas = [await one.stubs(), await two.stubs()]
        lost = 0
        for number in range(ROUNDS):
            contested = rollout_name(DEFAULT_PROJECT, uuid7())
            others = [[rollout_name(DEFAULT_PROJECT, uuid7()) for _ in range(3)] for _ in range(4)]
            results = await asyncio.gather(
                *(
                    _create_named(
                        replicas[caller % 2], [*names[:2], contested, names[2]], f"{number}/{caller}".encode()
                    )
                    for caller, names in enumerate(others)
                ),
                return_exceptions=True,
            )
            assert sum(not isinstance(result, BaseException) for result in results) == 1
            for names, result in zip(others, results, strict=True):
                if isinstance(result, BaseException):
                    assert isinstance(result, RolloutExists)
                    assert await _existing(replicas[0], names) == []
                    lost += 1
                else:
                    assert await _existing(replicas[0], names) == names
        assert lost == 3 * ROUNDS


async def test_racing_creations_of_the_same_content_all_succeed_and_create_once(database_url: str) -> None:
    async with running_store(database_url) as one, running_store(database_url) as two:
        replicas = [await one.stubs(), await two.stubs()]
        for _ in range(ROUNDS):
            shared = [rollout_name(DEFAULT_PROJECT, uuid7()) for _ in range(3)]
            own = [rollout_name(DEFAULT_PROJECT, uuid7()) for _ in range(6)]
            results = await asyncio.gather(
                *(_create_named(replicas[caller % 2], [*shared, own[caller]], b"same") for caller in range(6))
            )
            assert [names[:3] for names in results] == [shared] * 6
            assert await _existing(replicas[1], own) == own
        stats = await queue_stats(replicas[0])
        assert stats.queued_count == ROUNDS * 9


async def test_one_request_sent_to_two_replicas_at_once_creates_once(database_url: str) -> None:
    async with running_store(database_url) as one, running_store(database_url) as two:
        replicas = [await one.stubs(), await two.stubs()]
        for number in range(ROUNDS):
            results = await asyncio.gather(
                *(create(replicas[caller % 2], 3, request_id=f"request {number}") for caller in range(6))
            )
            assert len({tuple(names) for names in results}) == 1
        assert await _queued(replicas[0]) == 3 * ROUNDS


async def test_a_repeat_with_other_content_returns_the_first_result(stubs: Stubs) -> None:
    first = await create(stubs, 2, request_id="r", input=b"first")
    assert await create(stubs, 2, request_id="r", input=b"second") == first
    assert await create(stubs, 5, request_id="r", input=b"third") == first
    assert (await get(stubs, first[0])).input == b"first"
    assert await _queued(stubs) == 2


async def test_a_repeat_returns_the_first_result_although_its_times_have_passed(stubs: Stubs) -> None:
    name = rollout_name(DEFAULT_PROJECT, uuid7())
    request = pb.BatchCreateRolloutsRequest(
        rollouts=[rollout_pb2.Rollout(name=name, deadline_time=moment(0.8))], request_id="r"
    )
    unnumbered = pb.BatchCreateRolloutsRequest(rollouts=request.rollouts)
    await stubs.rollouts.BatchCreateRollouts(request)
    async with asyncio.timeout(20):
        while moment(0).ToNanoseconds() <= request.rollouts[0].deadline_time.ToNanoseconds():  # noqa: ASYNC110  # a clock
            await asyncio.sleep(0.05)
    for repeat in (request, unnumbered):
        again = await stubs.rollouts.BatchCreateRollouts(repeat)
        assert [rollout.name for rollout in again.rollouts] == [name]
    other = rollout_pb2.Rollout(deadline_time=request.rollouts[0].deadline_time)
    with pytest.raises(ArgumentInvalid):
        await stubs.rollouts.BatchCreateRollouts(pb.BatchCreateRolloutsRequest(rollouts=[other], request_id="new"))


async def test_the_id_of_a_refused_request_may_be_used_again(stubs: Stubs) -> None:
    await create(stubs, 1, group_id="full", group_size=1)
    with pytest.raises(ArgumentInvalid):
        await create(stubs, 1, group_id="full", group_size=1, request_id="r")
    names = await create(stubs, 3, request_id="r")
    assert len(await _existing(stubs, names)) == 3


async def test_a_request_that_was_recorded_but_not_created_is_created_when_it_is_repeated(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a replica that was killed between the two."""

    async def die(*_: object) -> None:
        raise asyncio.CancelledError

    with monkeypatch.context() as patched:
        patched.setattr(ExpiringVersions, "uses_of", die)
        # The stream that died is told of by nobody: the caller gives up by its own deadline.
        with pytest.raises((FulmenError, asyncio.CancelledError)):
            await stubs.rollouts.BatchCreateRollouts(
                pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout()] * 3, request_id="r"), timeout=2.0
            )
    assert await _queued(stubs) == 0
    names = await create(stubs, 3, request_id="r")
    assert await create(stubs, 3, request_id="r") == names
    await until_queued(stubs, 3)


async def _create_named(stubs: Stubs, names: list[str], content: bytes) -> list[str]:
    request = pb.BatchCreateRolloutsRequest(rollouts=[rollout_pb2.Rollout(name=name, input=content) for name in names])
    return [rollout.name for rollout in (await stubs.rollouts.BatchCreateRollouts(request)).rollouts]


async def _existing(stubs: Stubs, names: list[str]) -> list[str]:
    found = []
    for name in names:
        try:
            found.append((await get(stubs, name)).name)
        except RolloutNotFound:
            continue
    return found


async def _queued(stubs: Stubs) -> int:
    return (await queue_stats(stubs)).queued_count
