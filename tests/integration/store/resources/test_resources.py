"""Resources: versions never change, aliases move, publishing is all or none and only after the version that was expected."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from fulmen.errors import ArgumentInvalid, EtagMismatch, ResourceNotFound
from fulmen.store.v1 import resource_pb2
from fulmen.store.v1 import resource_service_pb2 as pb
from tests.support.store.resources import publish, read, set_alias
from tests.support.store.running import Stubs, create_project, pages_of


async def latest(stubs: Stubs, name: str) -> int:
    """Returns the number of the latest version, 0 if there is none."""
    try:
        return (await read(stubs, f"resources/{name}"))[0].version
    except ResourceNotFound:
        return 0


async def test_versions_count_up_and_latest_follows(stubs: Stubs) -> None:
    (first,), (second,) = [
        await publish(stubs, "prompt.a", content=content, metadata={"by": "tests"}) for content in (b"one", b"two")
    ]
    assert (first.version, second.version) == (1, 2)
    assert second.name == "resources/prompt.a/versions/2"
    assert second.sha256 == hashlib.sha256(b"two").digest()
    old, new, same = await read(stubs, first.name, "resources/prompt.a", "resources/prompt.a/aliases/latest")
    assert (old.content, new.content, same.content) == (b"one", b"two", b"two")
    assert new.metadata["by"] == "tests"
    with pytest.raises(ResourceNotFound):
        await read(stubs, "resources/prompt.a/versions/3")


async def test_publishing_is_all_or_none_and_tells_every_problem(stubs: Stubs) -> None:
    await publish(stubs, "prompt.a")
    resources = [
        resource_pb2.ResourceVersion(name=name, kind=kind)
        for name, kind in (("resources/fine", "prompt"), ("NOT FINE", "!"))
    ]
    with pytest.raises(ArgumentInvalid) as caught:
        await stubs.resources.PublishResources(pb.PublishResourcesRequest(resources=resources))
    assert {violation.field for violation in caught.value.violations} == {"resources[1].name", "resources[1].kind"}
    with pytest.raises(ArgumentInvalid):
        await publish(stubs, "prompt.a", kind="report")
    assert await latest(stubs, "fine") == 0


async def test_a_version_follows_only_the_one_that_was_expected(stubs: Stubs) -> None:
    await publish(stubs, "notes.a", expected={"notes.a": 0})
    await publish(stubs, "notes.a", expected={"notes.a": 1})
    with pytest.raises(EtagMismatch) as caught:
        await publish(stubs, "notes.a", "notes.b", expected={"notes.b": 0, "notes.a": 1})
    assert caught.value.metadata["resource"] == "notes.a"
    assert caught.value.metadata["latest_version"] == "2"
    assert (await latest(stubs, "notes.a"), await latest(stubs, "notes.b")) == (2, 0)


async def test_of_many_who_expect_the_same_version_one_publishes(stubs: Stubs) -> None:
    await publish(stubs, "notes.a")
    results = await asyncio.gather(
        *(publish(stubs, "notes.a", expected={"notes.a": 1}) for _ in range(8)), return_exceptions=True
    )
    assert sum(isinstance(result, list) for result in results) == 1
    assert sum(isinstance(result, EtagMismatch) for result in results) == 7
    assert await latest(stubs, "notes.a") == 2


async def test_a_repeated_request_is_answered_though_its_expectation_is_over(stubs: Stubs) -> None:
    (first,) = await publish(stubs, "notes.a", expected={"notes.a": 0}, request_id="once")
    await publish(stubs, "notes.a")
    (again,) = await publish(stubs, "notes.a", expected={"notes.a": 0}, request_id="once")
    assert again.name == first.name
    both = await asyncio.gather(*(publish(stubs, "notes.a", request_id="twice") for _ in range(6)))
    assert {versions[0].version for versions in both} == {3}
    # Taken by several resources at the same moment, an id is answered with the first.
    answers = await asyncio.gather(*(publish(stubs, f"other.{n}", request_id="shared") for n in range(6)))
    assert len({versions[0].name for versions in answers}) == 1
    assert sum([await latest(stubs, f"other.{n}") for n in range(6)]) == 1


async def test_dependencies_are_checked_and_kept_in_order(stubs: Stubs) -> None:
    base, other = await publish(stubs, "bundle.a", "prompt.b")
    (version,) = await publish(stubs, "agent.a", dependencies=[other.name, base.name])
    assert list(version.dependencies) == [other.name, base.name]
    (stored,) = await read(stubs, "resources/agent.a")
    assert list(stored.dependencies) == [other.name, base.name]


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


async def test_an_alias_moves_only_from_where_it_was_read(stubs: Stubs) -> None:
    for content in (b"one", b"two"):
        await publish(stubs, "prompt.a", content=content)
    first = await set_alias(stubs, "prompt.a", "stable", 1)
    moved = await set_alias(stubs, "prompt.a", "stable", 2, etag=first.etag)
    assert moved.etag != first.etag
    with pytest.raises(EtagMismatch):
        await set_alias(stubs, "prompt.a", "stable", 1, etag=first.etag)
    assert [version.content for version in await read(stubs, moved.name)] == [b"two"]
    with pytest.raises(ResourceNotFound):
        await set_alias(stubs, "prompt.a", "stable", 9)
    with pytest.raises(ArgumentInvalid):
        await set_alias(stubs, "prompt.a", "latest", 1)


async def test_versions_and_resources_are_listed_page_by_page(stubs: Stubs) -> None:
    for _ in range(5):
        await publish(stubs, "prompt.a")
    await publish(stubs, "agent.b", kind="report")
    request = pb.ListResourceVersionsRequest(parent="resources/prompt.a", page_size=2)
    pages = await pages_of(stubs.resources.ListResourceVersions, request)
    assert [[version.version for version in page.resources] for page in pages] == [[5, 4], [3, 2], [1]]
    assert not any(version.content for page in pages for version in page.resources)
    assert all([alias.version for alias in page.aliases] == [5] for page in pages)
    agents = await stubs.resources.ListResourceVersions(pb.ListResourceVersionsRequest(kind="report"))
    assert [version.name for version in agents.resources] == ["resources/agent.b/versions/1"]


async def test_two_versions_are_compared_by_number_or_alias(stubs: Stubs) -> None:
    for content in (b'{"b": 1, "a": 2}', b'{"a": 3, "b": 1}', b"\xff\xfe"):
        await publish(stubs, "prompt.a", content=content, kind="notes", content_type="application/json")
    await set_alias(stubs, "prompt.a", "stable", 1)
    found = await diff(stubs, "resources/prompt.a/aliases/stable", "resources/prompt.a/versions/2")
    assert found.unified_diff == (
        "--- resources/prompt.a/versions/1\n+++ resources/prompt.a/versions/2\n"
        '@@ -1,4 +1,4 @@\n {\n-  "a": 2,\n+  "a": 3,\n   "b": 1\n }\n'
    )
    assert (found.base.version, found.target.version, found.equal, found.truncated) == (1, 2, False, False)
    assert not found.base.content
    binary = await diff(stubs, "resources/prompt.a/versions/1", "resources/prompt.a")
    assert (binary.unified_diff, binary.equal) == ("", False)
    assert (binary.base.size_bytes, binary.target.size_bytes) == (16, 2)
    assert binary.base.sha256 != binary.target.sha256
    assert (await diff(stubs, "resources/prompt.a", "resources/prompt.a/versions/3")).equal
    with pytest.raises(ResourceNotFound):
        await diff(stubs, "resources/prompt.a", "resources/prompt.a/versions/4")
    with pytest.raises(ArgumentInvalid):
        await diff(stubs, "", "resources/prompt.a")


async def diff(stubs: Stubs, base: str, target: str) -> pb.DiffResourcesResponse:
    """Compares two versions."""
    request = pb.DiffResourcesRequest(base=base, target=target)
    response: pb.DiffResourcesResponse = await stubs.resources.DiffResources(request)
    return response
