"""Publishing: only after the version that the caller knows, with the versions that it needs, for as long as it is to last."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration

from fulmen.errors import ArgumentInvalid, EtagMismatch, ResourceNotFound
from fulmen.store.v1 import resource_pb2
from fulmen.store.v1 import resource_service_pb2 as pb
from tests.support.store.running import Stubs, create_project


async def publish(
    stubs: Stubs,
    *names: str,
    expected: dict[str, int] | None = None,
    dependencies: list[str] | None = None,
    ttl_s: float | None = None,
    request_id: str = "",
    kind: str = "prompt",
    project: str = "",
) -> list[resource_pb2.ResourceVersion]:
    """Publishes one version of each named resource."""
    ttl = None if ttl_s is None else Duration(seconds=int(ttl_s), nanos=round(ttl_s % 1 * 1e9))
    response = await stubs.resources.PublishResources(
        pb.PublishResourcesRequest(
            resources=[
                resource_pb2.ResourceVersion(
                    name=f"resources/{name}",
                    kind=kind,
                    content=b"x",
                    dependencies=dependencies,
                    ttl=ttl,
                    project=project,
                )
                for name in names
            ],
            expected_latest_versions={f"resources/{name}": number for name, number in (expected or {}).items()},
            request_id=request_id,
        )
    )
    return list(response.resources)


async def latest(stubs: Stubs, name: str) -> int:
    """Returns the number of the latest version, 0 if there is none."""
    try:
        response = await stubs.resources.GetResources(pb.GetResourcesRequest(names=[f"resources/{name}"]))
    except ResourceNotFound:
        return 0
    return int(response.resources[0].version)


async def test_a_version_follows_only_the_one_that_was_expected(stubs: Stubs) -> None:
    await publish(stubs, "route.a", expected={"route.a": 0})
    await publish(stubs, "route.a", expected={"route.a": 1})
    with pytest.raises(EtagMismatch) as caught:
        await publish(stubs, "route.a", "route.b", expected={"route.b": 0, "route.a": 1})
    assert caught.value.metadata["resource"] == "route.a"
    assert caught.value.metadata["latest_version"] == "2"
    assert (await latest(stubs, "route.a"), await latest(stubs, "route.b")) == (2, 0)


async def test_of_many_who_expect_the_same_version_one_publishes(stubs: Stubs) -> None:
    await publish(stubs, "route.a")
    results = await asyncio.gather(
        *(publish(stubs, "route.a", expected={"route.a": 1}) for _ in range(8)), return_exceptions=True
    )
    assert sum(isinstance(result, list) for result in results) == 1
    assert sum(isinstance(result, EtagMismatch) for result in results) == 7
    assert await latest(stubs, "route.a") == 2


async def test_a_repeated_request_is_answered_though_its_expectation_is_over(stubs: Stubs) -> None:
    (first,) = await publish(stubs, "route.a", expected={"route.a": 0}, request_id="once")
    await publish(stubs, "route.a")
    (again,) = await publish(stubs, "route.a", expected={"route.a": 0}, request_id="once")
    assert again.name == first.name
    both = await asyncio.gather(*(publish(stubs, "route.a", request_id="twice") for _ in range(6)))
    assert {versions[0].version for versions in both} == {3}


async def test_a_request_id_taken_by_other_resources_at_the_same_moment_is_answered_with_the_first(
    stubs: Stubs,
) -> None:
    answers = await asyncio.gather(*(publish(stubs, f"route.{n}", request_id="shared") for n in range(6)))
    assert len({versions[0].name for versions in answers}) == 1
    there = [await latest(stubs, f"route.{n}") for n in range(6)]
    assert sum(there) == 1


async def test_dependencies_are_checked_and_kept_in_order(stubs: Stubs) -> None:
    base, other = await publish(stubs, "bundle.a", "prompt.b")
    (version,) = await publish(stubs, "agent.a", dependencies=[other.name, base.name])
    assert list(version.dependencies) == [other.name, base.name]
    (read,) = (await stubs.resources.GetResources(pb.GetResourcesRequest(names=["resources/agent.a"]))).resources
    assert list(read.dependencies) == [other.name, base.name]


async def test_every_missing_dependency_is_named_and_nothing_is_published(stubs: Stubs) -> None:
    (known,) = await publish(stubs, "bundle.a")
    await create_project(stubs, "projects/other")
    await publish(stubs, "bundle.other", project="projects/other")
    missing = ["resources/bundle.a/versions/2", "resources/bundle.other/versions/1"]
    with pytest.raises(ArgumentInvalid) as caught:
        await publish(stubs, "agent.a", "agent.b", dependencies=[missing[0], known.name, missing[1]])
    assert {violation.field for violation in caught.value.violations} == {
        f"resources[{index}].dependencies[{position}]" for index in (0, 1) for position in (0, 2)
    }
    assert await latest(stubs, "agent.a") == 0
    with pytest.raises(ArgumentInvalid) as caught:
        await publish(stubs, "agent.a", dependencies=["resources/bundle.a", *[known.name] * 32])
    assert {violation.field for violation in caught.value.violations} == {
        "resources[0].dependencies", "resources[0].dependencies[0]",
    }  # fmt: skip


async def test_a_ttl_says_when_a_version_may_go(stubs: Stubs) -> None:
    (version,) = await publish(stubs, "prompt.a", ttl_s=90.5)
    assert version.ttl.ToMilliseconds() == 90_500
    lasts_ms = version.expire_time.ToMilliseconds() - version.create_time.ToMilliseconds()
    assert abs(lasts_ms - 90_500) <= 1
    (kept,) = await publish(stubs, "prompt.a")
    assert not kept.HasField("ttl")
    assert not kept.HasField("expire_time")
    for ttl_s in (59, 11 * 365 * 86_400, 0):
        with pytest.raises(ArgumentInvalid):
            await publish(stubs, "prompt.a", ttl_s=ttl_s)
