"""Garbage collection: what is used stays, what is not goes in the end, whoever is faster."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import asyncpg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fulmen.errors import ArgumentInvalid
from fulmen.store.v1 import resource_service_pb2 as pb
from fulmen_store.database.database import Database, connect
from fulmen_store.resources.garbage_collection import ResourceGarbageCollector
from fulmen_store.resources.table import GarbageTable
from tests.support.soak import long_after
from tests.support.store.resources import publish, set_alias
from tests.support.store.running import LIMIT_S, Stubs, cancel, create

OVER = "update resource_version set expires_at = now() - interval '1 second' where ttl_ms is not null"

BLOCKED = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"


def collector(database: Database) -> ResourceGarbageCollector:
    """Makes a collector."""
    return ResourceGarbageCollector(table=GarbageTable(database))


async def put(stubs: Stubs, resource: str, *, needs: list[str] | None = None, ttl: bool = True) -> str:
    """Publishes a version, with a ttl unless told otherwise, and returns its name."""
    (version,) = await publish(stubs, resource, dependencies=needs, ttl_s=60 if ttl else None)
    return str(version.name)


async def there(stubs: Stubs, resource: str) -> list[str]:
    """Returns the versions of a resource that are there."""
    request = pb.ListResourceVersionsRequest(parent=f"resources/{resource}", page_size=1000)
    return sorted(version.name for version in (await stubs.resources.ListResourceVersions(request)).resources)


async def test_an_expired_version_goes_when_latest_has_moved_on(
    stubs: Stubs, database: Database, connection: Any
) -> None:
    first, second = await put(stubs, "prompt.a"), await put(stubs, "prompt.a")
    assert await collector(database).collect() == 0
    await connection.execute(OVER)
    assert await collector(database).collect() == 1
    assert await there(stubs, "prompt.a") == [second]
    third = await put(stubs, "prompt.a", ttl=False)
    assert third.endswith("/3")
    assert await collector(database).collect() == 1
    assert first not in await there(stubs, "prompt.a")
    assert await there(stubs, "prompt.a") == [third]


async def test_a_chain_of_dependencies_goes_from_its_end(stubs: Stubs, database: Database, connection: Any) -> None:
    bundle = await put(stubs, "bundle.a")
    agent = await put(stubs, "agent.a", needs=[bundle])
    team = await put(stubs, "team.a", needs=[agent])
    for resource in ("bundle.a", "agent.a"):
        await put(stubs, resource, ttl=False)
    await connection.execute(OVER)
    assert await collector(database).collect() == 0
    await set_alias(stubs, "team.a", "stable", 1)
    await put(stubs, "team.a", ttl=False)
    assert await collector(database).collect() == 0
    assert bundle in await there(stubs, "bundle.a")
    await set_alias(stubs, "team.a", "stable", 2)
    assert await collector(database).collect() == 3
    for gone, resource in ((bundle, "bundle.a"), (agent, "agent.a"), (team, "team.a")):
        assert await there(stubs, resource) == [gone.replace("/1", "/2")]


async def test_a_live_rollout_keeps_its_versions_and_an_ended_one_does_not(
    stubs: Stubs, database: Database, connection: Any
) -> None:
    agent, prompt = await put(stubs, "agent.a"), await put(stubs, "prompt.a")
    for resource in ("agent.a", "prompt.a"):
        await put(stubs, resource, ttl=False)
    (by_agent,) = await create(stubs, agent=agent)
    (by_prompt,) = await create(stubs, agent="resources/agent.a/versions/2", resource_versions={"p": prompt})
    await connection.execute(OVER)
    assert await collector(database).collect() == 0
    await cancel(stubs, by_agent)
    assert await collector(database).collect() == 1
    assert await there(stubs, "agent.a") == ["resources/agent.a/versions/2"]
    await cancel(stubs, by_prompt)
    assert await collector(database).collect() == 1
    with pytest.raises(ArgumentInvalid, match="has been removed"):
        await create(stubs, resource_versions={"p": prompt})
    assert await connection.fetchval("select count(*) from resource_use") == 0


async def test_a_repeated_request_is_answered_although_its_version_is_gone(
    stubs: Stubs, database: Database, connection: Any
) -> None:
    agent = await put(stubs, "agent.a")
    await put(stubs, "agent.a")
    names = await create(stubs, agent=agent, request_id="once")
    await cancel(stubs, names[0])
    await connection.execute(OVER)
    assert await collector(database).collect() == 1
    assert await create(stubs, agent=agent, request_id="once") == names
    with pytest.raises(ArgumentInvalid):
        await create(stubs, agent=agent)


async def test_a_version_that_a_rollout_is_just_taking_is_passed_over(
    stubs: Stubs, database: Database, connection: Any
) -> None:
    await put(stubs, "agent.a")
    await put(stubs, "agent.a")
    await connection.execute(OVER)
    async with connection.transaction():
        await connection.execute(
            "insert into resource_use (resource_id, version, rollout_id)"
            " select resource_id, 1, gen_random_uuid() from resource_version where version = 1"
        )
        assert await collector(database).collect() == 0
    # Its rollout does not exist, which is the same as one that has ended.
    assert await collector(database).collect() == 1


async def test_a_rollout_that_comes_too_late_is_refused_and_its_neighbours_are_not(
    stubs: Stubs, connection: Any
) -> None:
    agent = await put(stubs, "agent.a")
    await put(stubs, "agent.a")
    (kept,) = await create(stubs, agent=agent)
    await connection.execute(OVER)
    await connection.execute("delete from resource_use")
    async with connection.transaction():
        await connection.execute("delete from resource_alias_move where version = 1")
        await connection.execute("delete from resource_version where version = 1")
        late = asyncio.create_task(create(stubs, agent=agent))
        await until_blocked(connection)
        # These two wait for the first one's commit and share the next.
        later = asyncio.create_task(create(stubs, agent=agent))
        neighbour = asyncio.create_task(create(stubs, agent="resources/agent.b/versions/1"))
    for refused in (late, later):
        with pytest.raises(ArgumentInvalid, match="has been removed"):
            await refused
    assert await neighbour
    assert kept


async def test_rollouts_and_the_collector_race_and_nobody_runs_without_its_version(
    stubs: Stubs, database: Database, connection: Any
) -> None:
    names = [await put(stubs, f"agent.{n}") for n in range(30)]
    for n in range(30):
        await put(stubs, f"agent.{n}", ttl=False)
    await asyncio.gather(*(create(stubs, agent=name) for name in names))
    await connection.execute("delete from item; delete from resource_use")
    await connection.execute(OVER)
    collectors = [asyncio.create_task(collector(database).collect()) for _ in range(3)]
    results = await asyncio.gather(*(create(stubs, agent=name) for name in names), return_exceptions=True)
    await asyncio.gather(*collectors)
    for n, (name, result) in enumerate(zip(names, results, strict=True)):
        assert isinstance(result, list | ArgumentInvalid), result
        assert (name in await there(stubs, f"agent.{n}")) == isinstance(result, list)
    assert await collector(database).collect() == 0


async def test_uses_by_ended_rollouts_are_forgotten_before_the_ttl_is_over(
    stubs: Stubs, database: Database, connection: Any
) -> None:
    agent = await put(stubs, "agent.a")
    names = await create(stubs, 20, agent=agent)
    for name in names[:15]:
        await cancel(stubs, name)
    await collector(database).delete_ended_uses()
    assert await connection.fetchval("select count(*) from resource_use") == 5


async def until_blocked(connection: Any) -> None:
    """Waits until somebody waits for a lock of this database."""
    async with asyncio.timeout(LIMIT_S):
        while not await connection.fetchval(BLOCKED):  # noqa: ASYNC110  # state of another process
            await asyncio.sleep(0.02)


class World:
    """What was published, what points and what runs, and what of it the collector must leave."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.needs: dict[str, list[str]] = {}
        self.lasting: set[str] = set()
        self.over: set[str] = set()
        self.aliases: dict[tuple[str, str], str] = {}
        self.rollouts: dict[str, list[str]] = {}

    def kept(self) -> set[str]:
        """Returns the names of the versions that stay."""
        waiting = [*self.aliases.values(), *itertools.chain.from_iterable(self.rollouts.values())]
        waiting += [name for name in self.needs if name in self.lasting or name not in self.over]
        kept: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name not in kept:
                kept.add(name)
                waiting += self.needs[name]
        return kept


counter = itertools.count()


@pytest.mark.parametrize("examples", long_after(1, [6, 25]))
def test_whatever_happens_used_versions_stay_and_unused_ones_go(
    fuzzed: tuple[asyncio.AbstractEventLoop, Stubs], database_url: str, examples: int
) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def histories(data: st.DataObject) -> None:
        play_once(*fuzzed, database_url, data)

    histories()


def play_once(loop: asyncio.AbstractEventLoop, stubs: Stubs, database_url: str, data: st.DataObject) -> None:
    """Lets anything happen to a world of its own, with a collection after each step."""
    world = World(f"x{next(counter)}")

    async def play() -> None:
        database = await connect(database_url, connections=2, start_limit_s=5)
        bare = await asyncpg.connect(database_url)
        try:
            for _ in range(data.draw(st.integers(10, 30), label="steps")):
                await step(world, stubs, data, bare)
                await collector(database).collect()
                assert await present(stubs, world) == world.kept()
                world.needs = {name: needs for name, needs in world.needs.items() if name in world.kept()}
            for name in list(world.rollouts):
                await cancel(stubs, name)
            world.rollouts.clear()
            world.over |= set(world.needs)
            await bare.execute(OVER)
            await collector(database).collect()
            assert await present(stubs, world) == world.kept()
        finally:
            await bare.close()
            await database.close()

    loop.run_until_complete(play())


async def step(world: World, stubs: Stubs, data: st.DataObject, bare: Any) -> None:
    """Does one thing to the store and to the model of it."""
    names = sorted(world.needs)
    what = data.draw(
        st.sampled_from(["publish", "publish", "alias", "run", "run", "end", "clock", "later"]), label="what"
    )
    if what == "publish" or not names:
        resource = f"{world.prefix}.{data.draw(st.integers(0, 3), label='resource')}"
        needs = sorted(data.draw(st.sets(st.sampled_from(names), max_size=2), label="needs")) if names else []
        ttl = data.draw(st.integers(0, 4), label="ttl") > 0
        name = await put(stubs, resource, needs=needs, ttl=ttl)
        world.needs[name] = needs
        world.aliases[resource, "latest"] = name
        if not ttl:
            world.lasting.add(name)
    elif what == "alias":
        name = data.draw(st.sampled_from(names), label="target")
        resource, version = name.split("/")[1], int(name.rpartition("/")[2])
        alias = data.draw(st.sampled_from(["stable", "next"]), label="alias")
        await set_alias(stubs, resource, alias, version)
        world.aliases[resource, alias] = name
    elif what == "run":
        used = sorted(data.draw(st.sets(st.sampled_from(names), min_size=1, max_size=2), label="used"))
        (created,) = await create(stubs, agent=used[0], resource_versions={f"{n}": one for n, one in enumerate(used)})
        world.rollouts[created] = used
    elif what == "end" and world.rollouts:
        ended = data.draw(st.sampled_from(sorted(world.rollouts)), label="ended")
        await cancel(stubs, ended)
        del world.rollouts[ended]
    elif what == "later":
        await bare.execute(OVER)
        world.over |= world.needs.keys() - world.lasting
    elif what == "clock":
        over = data.draw(st.sampled_from(names), label="over")
        resource, number = over.split("/")[1], int(over.rpartition("/")[2])
        await bare.execute(
            f"{OVER} and version = $2 and resource_id = (select id from resource where name = $1)", resource, number
        )
        world.over.add(over)


async def present(stubs: Stubs, world: World) -> set[str]:
    """Returns the names of all versions of this world that are there."""
    found: set[str] = set()
    for n in range(4):
        found.update(await there(stubs, f"{world.prefix}.{n}"))
    return found
