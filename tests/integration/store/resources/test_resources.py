"""Resources: versions never change, aliases move, watchers miss nothing."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from fulmen.errors import ArgumentInvalid, EtagMismatch, PermissionDenied, ResourceNotFound
from fulmen.store.v1 import resource_pb2
from fulmen.store.v1 import resource_service_pb2 as pb
from fulmen_service_kit.tokens import Role
from tests.support.store.running import LIMIT_S, StoreHandle, Stubs


async def publish(
    stubs: Stubs, resource: str, content: bytes = b"x", *, kind: str = "prompt", request_id: str = ""
) -> resource_pb2.ResourceVersion:
    """Publishes one version."""
    response = await stubs.resources.PublishResources(
        pb.PublishResourcesRequest(
            resources=[
                resource_pb2.ResourceVersion(
                    name=f"resources/{resource}", kind=kind, content=content, metadata={"by": "tests"}
                )
            ],
            request_id=request_id,
        )
    )
    version: resource_pb2.ResourceVersion = response.resources[0]
    return version


async def read(stubs: Stubs, *names: str) -> list[resource_pb2.ResourceVersion]:
    """Returns versions with content."""
    return list((await stubs.resources.GetResources(pb.GetResourcesRequest(names=names))).resources)


async def test_versions_count_up_and_latest_follows(stubs: Stubs) -> None:
    first, second = await publish(stubs, "prompt.a", b"one"), await publish(stubs, "prompt.a", b"two")
    assert (first.version, second.version) == (1, 2)
    assert second.name == "resources/prompt.a/versions/2"
    assert second.sha256 == hashlib.sha256(b"two").digest()
    old, new, same = await read(stubs, first.name, "resources/prompt.a", "resources/prompt.a/aliases/latest")
    assert (old.content, new.content, same.content) == (b"one", b"two", b"two")
    assert new.metadata["by"] == "tests"
    with pytest.raises(ResourceNotFound):
        await read(stubs, "resources/prompt.a/versions/3")


async def test_concurrent_publishers_get_distinct_numbers_without_a_gap(stubs: Stubs) -> None:
    versions = await asyncio.gather(*(publish(stubs, "policy.p", str(n).encode()) for n in range(12)))
    assert sorted(version.version for version in versions) == list(range(1, 13))


async def test_a_repeated_request_publishes_once(stubs: Stubs) -> None:
    first = await publish(stubs, "policy.p", b"1", request_id="step-1")
    again = await publish(stubs, "policy.p", b"1", request_id="step-1")
    after = await publish(stubs, "policy.p", b"2", request_id="step-2")
    assert (first.version, again.version, after.version) == (1, 1, 2)


async def test_publishing_is_all_or_none_and_tells_every_problem(stubs: Stubs) -> None:
    await publish(stubs, "prompt.a")
    request = pb.PublishResourcesRequest(
        resources=[
            resource_pb2.ResourceVersion(name="resources/fine", kind="prompt"),
            resource_pb2.ResourceVersion(name="NOT FINE", kind="!"),
        ]
    )
    with pytest.raises(ArgumentInvalid) as caught:
        await stubs.resources.PublishResources(request)
    assert {violation.field for violation in caught.value.violations} == {"resources[1].name", "resources[1].kind"}
    with pytest.raises(ArgumentInvalid):
        await publish(stubs, "prompt.a", kind="agent")
    with pytest.raises(ResourceNotFound):
        await read(stubs, "resources/fine")


async def test_an_alias_moves_only_from_where_it_was_read(stubs: Stubs) -> None:
    await publish(stubs, "prompt.a", b"one")
    await publish(stubs, "prompt.a", b"two")
    name = "resources/prompt.a/aliases/stable"
    first = (await stubs.resources.SetAlias(pb.SetAliasRequest(name=name, version=1))).alias
    moved = (await stubs.resources.SetAlias(pb.SetAliasRequest(name=name, version=2, etag=first.etag))).alias
    assert moved.etag != first.etag
    with pytest.raises(EtagMismatch):
        await stubs.resources.SetAlias(pb.SetAliasRequest(name=name, version=1, etag=first.etag))
    assert [version.content for version in await read(stubs, name)] == [b"two"]
    with pytest.raises(ResourceNotFound):
        await stubs.resources.SetAlias(pb.SetAliasRequest(name=name, version=9))
    with pytest.raises(ArgumentInvalid):
        await stubs.resources.SetAlias(pb.SetAliasRequest(name="resources/prompt.a/aliases/latest", version=1))


async def test_versions_and_resources_are_listed_page_by_page(stubs: Stubs) -> None:
    for number in range(5):
        await publish(stubs, "prompt.a", str(number).encode())
    await publish(stubs, "agent.b", kind="agent")
    listed, token = [], ""
    while True:
        page = await stubs.resources.ListResourceVersions(
            pb.ListResourceVersionsRequest(parent="resources/prompt.a", page_size=2, page_token=token)
        )
        listed += [version.version for version in page.resources]
        assert not any(version.content for version in page.resources)
        assert [alias.version for alias in page.aliases] == [5]
        token = page.next_page_token
        if not token:
            break
    assert listed == [5, 4, 3, 2, 1]
    latest = await stubs.resources.ListResourceVersions(pb.ListResourceVersionsRequest(kind="agent"))
    assert [version.name for version in latest.resources] == ["resources/agent.b/versions/1"]


async def test_a_watcher_gets_the_snapshot_then_every_change(stubs: Stubs) -> None:
    await publish(stubs, "route.a", b"old", kind="route")
    await publish(stubs, "route.a", b"now", kind="route")
    await publish(stubs, "prompt.x")
    stream = stubs.resources.WatchResources(pb.WatchResourcesRequest(kinds=["route"], id_prefix="route."))
    seen: list[bytes] = []
    async with asyncio.timeout(LIMIT_S):
        while not (message := await stream.read()).snapshot_complete:
            seen += [version.content for version in message.resources]
        assert seen == [b"now"]
        for number in range(5):
            await publish(stubs, "route.a", str(number).encode(), kind="route")
        await publish(stubs, "route.b", b"b", kind="route")
        await stubs.resources.SetAlias(pb.SetAliasRequest(name="resources/route.b/aliases/stable", version=1))
        aliases: list[str] = []
        while len(seen) < 7 or "resources/route.b/aliases/stable" not in aliases:
            message = await stream.read()
            seen += [version.content for version in message.resources]
            aliases += [alias.name for alias in message.aliases]
    assert seen[1:] == [b"0", b"1", b"2", b"3", b"4", b"b"]


async def test_runners_read_and_do_not_publish(store: StoreHandle, stubs: Stubs) -> None:
    await publish(stubs, "agent.a", kind="agent")
    runner = await store.stubs(role=Role.RUNNER)
    assert await read(runner, "resources/agent.a")
    with pytest.raises(PermissionDenied):
        await publish(runner, "agent.a", kind="agent")


async def test_two_versions_are_compared_by_number_or_alias(stubs: Stubs) -> None:
    for content in (b'{"b": 1, "a": 2}', b'{"a": 3, "b": 1}', b"\xff\xfe"):
        version = resource_pb2.ResourceVersion(
            name="resources/prompt.a", kind="prompt", content=content, content_type="application/json"
        )
        await stubs.resources.PublishResources(pb.PublishResourcesRequest(resources=[version]))
    await stubs.resources.SetAlias(pb.SetAliasRequest(name="resources/prompt.a/aliases/stable", version=1))
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
    same = await diff(stubs, "resources/prompt.a", "resources/prompt.a/versions/3")
    assert same.equal
    with pytest.raises(ResourceNotFound):
        await diff(stubs, "resources/prompt.a", "resources/prompt.a/versions/4")
    with pytest.raises(ArgumentInvalid):
        await diff(stubs, "", "resources/prompt.a")


async def diff(stubs: Stubs, base: str, target: str) -> pb.DiffResourcesResponse:
    """Compares two versions."""
    response: pb.DiffResourcesResponse = await stubs.resources.DiffResources(
        pb.DiffResourcesRequest(base=base, target=target)
    )
    return response
