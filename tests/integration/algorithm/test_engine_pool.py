"""The engine pool: the engines of each policy, eviction of the idlest, recovery after a restart."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fulmen.errors import QuotaExceeded
from fulmen_algorithm.engines import pool as pool_module
from fulmen_algorithm.engines.engine import EngineFailed
from fulmen_algorithm.engines.joined import JoinedEngine, JoiningEngine
from fulmen_algorithm.engines.proxy_admin import MAX_BACKEND_ID, backend_id
from fulmen_algorithm.policy.engine_settings import ExternalEngine
from fulmen_algorithm.runs.failure import RunFailed
from tests.support.algorithm.light_engines import WAIT_S, World, light_world


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with light_world(tmp_path) as made:
        yield made


async def test_each_policy_has_an_engine_a_backend_and_a_port_of_its_own(world):
    async with world.pool() as pool:
        await world.serve(pool, "a")
        second = await world.serve(pool, "b")
        assert world.proxy.backends == {
            "backends/engine-a": "http://127.0.0.1:9000/v1",
            "backends/engine-b": "http://127.0.0.1:9001/v1",
        }
        await second.swap(world.published("b", 2))
        assert [engine.swaps for _, _, engine in world.started] == [[], [2]]
        assert await second.sampled_tokens() == 7


async def test_a_model_name_in_use_outside_the_project_is_refused_before_any_engine_is_touched(world):
    async with world.pool() as pool:
        (await world.serve(pool, "a", project="projects/x")).release()
        world.proxy.routes["routes/b"], world.proxy.projects["routes/b"] = 0, ""
        for policy in ("a", "b"):
            with pytest.raises(RunFailed, match=f"{policy!r} is in use outside projects/y"):
                await world.serve(pool, policy, 2, project="projects/y")
        assert [(policy, version, engine.swaps) for policy, version, engine in world.started] == [("a", 1, [])]
        assert world.proxy.projects["routes/a"] == "projects/x"


async def test_a_name_whose_route_was_deleted_is_free_and_its_engine_gives_way(world):
    async with world.pool() as pool:
        (await world.serve(pool, "a", project="projects/x")).release()
        world.proxy.routes.clear()
        await world.serve(pool, "a", 2, project="projects/y")
        assert [(version, engine.end.is_set()) for _, version, engine in world.started] == [(1, True), (2, False)]
        assert world.proxy.projects["routes/a"] == "projects/y"


async def test_a_file_of_served_versions_that_cannot_be_read_stops_nothing(world):
    (world.folder / "served.json").write_text('[{"policy": 1}]')
    async with world.pool() as pool:
        await world.serve(pool, "a")
        assert [policy for policy, _, _ in world.started] == ["a"]


async def test_the_idlest_engine_of_an_ended_run_makes_room_and_no_other(world):
    async with world.pool() as pool:
        first, second = await world.serve(pool, "a"), await world.serve(pool, "b")
        with pytest.raises(RunFailed, match=r"needs 1 of the service's 2 engines .* 2 serve policies of active runs"):
            await world.serve(pool, "c")
        second.release()
        first.release()
        await world.serve(pool, "c")
        assert set(world.proxy.routes) == {"routes/a", "routes/c"}
        assert world.proxy.backends["backends/engine-c"] == "http://127.0.0.1:9001/v1"
        assert [engine.end.is_set() for _, _, engine in world.started] == [False, True, False]


async def test_a_policy_whose_run_has_ended_is_served_on_and_again_when_its_engine_dies(world):
    async with world.pool() as pool:
        serving = await world.serve(pool, "a", 3)
        serving.release()
        world.started[0][2].end.set()
        await world.until_started(2)
        assert [(policy, version) for policy, version, _ in world.started] == [("a", 3), ("a", 3)]


async def test_a_policy_that_another_service_runs_is_left_to_it_and_never_registered_again(world):
    async with world.pool() as pool:
        await world.serve(pool, "a", 3)
        await world.serve(pool, "b")
        pool.hand_over("a")
        world.proxy.backends["backends/engine-a"] = "http://another:9000/v1"
        world.started[0][2].end.set()
        await world.serve(pool, "c")  # takes its slot
        assert world.proxy.backends["backends/engine-a"] == "http://another:9000/v1"
        assert "routes/a" in world.proxy.routes
        assert [(policy, version) for policy, version, _ in world.started] == [("a", 3), ("b", 1), ("c", 1)]


async def test_a_policy_that_another_service_has_run_since_is_not_served_again_at_a_start(world):
    async with world.pool() as pool:
        for policy in ("a", "b"):
            (await world.serve(pool, policy)).release()
    world.elsewhere = {"a"}
    async with world.pool():
        await world.until_started(3)
    assert [policy for policy, _, _ in world.started] == ["a", "b", "b"]


@pytest.mark.parametrize("failure", ["start", "registration"])
async def test_an_engine_that_cannot_be_brought_back_is_tried_again_and_no_other_is_touched(world, failure, capsys):
    async with world.pool() as pool:
        await world.serve(pool, "a", 3)
        second = await world.serve(pool, "b")
        match failure:
            case "start":
                world.failures = [OSError("no such program")]
            case "registration":
                world.proxy.refusals = 1
        world.proxy.backends.clear()
        world.started[0][2].end.set()
        await world.until_registered("backends/engine-a")
        await second.swap(world.published("b", 2))
        assert [(policy, version) for policy, version, _ in world.started] == [("a", 3), ("b", 1), ("a", 3)]
        assert [engine.end.is_set() for _, _, engine in world.started] == [True, False, False]
    logged = capsys.readouterr().out
    assert "engine_supervisor_failed" in logged
    assert "error_id" in logged


async def test_a_policy_that_cannot_be_served_again_keeps_no_other_from_it(world):
    async with world.pool() as pool:
        for policy in ("a", "b"):
            (await world.serve(pool, policy)).release()
    world.failures = [OSError("no such program")]
    async with world.pool() as pool:
        await world.until_started(3)
        world.started[2][2].end.set()
        await world.until_started(4)
        assert world.started[2][0] == world.started[3][0]


async def test_what_was_served_comes_back_with_the_service_and_a_run_finds_it_there(world):
    async with world.pool() as pool:
        (await world.serve(pool, "a", 1)).release()
        gone = await world.serve(pool, "b", 1)
        await gone.swap(world.published("b", 2))
    (world.folder / "b-2").rmdir()
    world.proxy.routes.clear()
    async with world.pool() as pool:
        await world.until_started(3)
        await world.serve(pool, "a", 1)
        assert [(policy, version) for policy, version, _ in world.started[2:]] == [("a", 1)]
        assert world.proxy.routes == {"routes/a": 1}
        assert world.started[2][2].swaps == []
        await world.serve(pool, "a", 2)
        assert [(policy, version) for policy, version, _ in world.started[2:]] == [("a", 1)]
        assert world.started[2][2].swaps == [2]
        assert world.proxy.routes == {"routes/a": 2}


async def test_a_version_is_named_when_an_engine_that_is_kept_has_it_and_not_before(world):
    async with world.pool() as pool:
        (await world.serve(pool, "a", 1)).release()
        await world.serve(pool, "a", 2)
        # The proxy may have lost its routes meanwhile.
        world.proxy.routes.clear()
        await world.serve(pool, "a", 3)
        [(_, _, engine)] = world.started
        assert engine.routed == [({"routes/a": 1}, {"routes/a": 2}), ({}, {"routes/a": 3})]


async def test_an_external_engine_is_promoted_before_it_resumes_with_reloaded_weights(world):
    engine = ExternalEngine(kind="external", base_url="http://127.0.0.1:1/v1")
    async with world.pool() as pool:
        serving = await world.serve(pool, "a", 1, engine)
        world.started[0][2].failures.append(EngineFailed("It refuses."))
        await serving.swap(world.published("a", 2))
        assert [made.routed for _, _, made in world.started] == [[({}, {})], [({}, {"routes/a": 2})]]
        assert world.proxy.routes == {"routes/a": 2}


async def test_a_run_cancelled_while_an_engine_is_evicted_leaves_no_engine_unsupervised(world):
    async with world.pool(max_engines=1) as pool:
        (await world.serve(pool, "a", 1)).release()
        world.proxy.answers.clear()
        waiting = asyncio.create_task(world.serve(pool, "b", 1))
        await asyncio.wait_for(world.proxy.asked.wait(), WAIT_S)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        world.proxy.answers.set()
        assert world.started[0][2].end.is_set()
        await world.serve(pool, "a", 2)
        world.started[1][2].end.set()
        await world.until_started(3)
        assert [(policy, version) for policy, version, _ in world.started] == [("a", 1), ("a", 2), ("a", 2)]


def test_ids_of_backends_are_short_and_different():
    names = {backend_id("engine", "p" * 62 + end, index) for end in "ab" for index in range(3)}
    names |= {backend_id("engine", policy, index) for policy in ("a", "1-a") for index in range(3)}
    assert len(names) == 12
    assert all(len(name) <= MAX_BACKEND_ID for name in names)


async def test_no_more_engines_join_a_policy_than_its_routes_may_have_targets(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "MAX_REPLICAS", 1)
    async with world.pool() as pool:
        await world.serve(pool, "a")
        (run,) = [place.run for place in pool._places.values()]
        joining = JoinedEngine(JoiningEngine(engine_id="gpu-7", base_url="http://10.0.0.7:8000/v1"))
        with pytest.raises(QuotaExceeded):
            await asyncio.wait_for(pool.join(run, joining), WAIT_S)
