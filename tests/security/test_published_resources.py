"""What a tenant publishes changes nothing that others use: kinds that services act on are for services (T3)."""

from __future__ import annotations

from typing import Any, cast

import pytest

from fulmen.errors import ArgumentInvalid, PermissionDenied
from fulmen.llm_proxy.v1 import backend_pb2, route_pb2
from fulmen.store.v1 import resource_pb2
from fulmen.store.v1 import resource_service_pb2 as res
from fulmen_algorithm.policy.stored_weights import stored_policy
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import Content
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import StoreHandle, Stubs, create_project

EVIL = "http://evil.example/v1"
DOCUMENTS = {
    "backend": backend_pb2.Backend(name="backends/evil", base_url=EVIL, key_name="engine").SerializeToString(),
    "route": route_pb2.Route(name="routes/tiny", targets=[{"backend": "backends/evil"}]).SerializeToString(),
    "policy": b'{"path": "/etc"}',
}
MINE, THEIRS = "projects/mine", "projects/theirs"


def publication(*kinds: str, project: str = "") -> res.PublishResourcesRequest:
    """Returns a request that publishes one resource of each kind."""
    versions = [
        resource_pb2.ResourceVersion(
            name=f"resources/{kind}.evil", project=project, kind=kind, content=DOCUMENTS.get(kind, b"x")
        )
        for kind in kinds
    ]
    return res.PublishResourcesRequest(resources=versions)


@pytest.mark.parametrize("role", [Role.CLIENT, Role.READER, Role.RUNNER])
@pytest.mark.parametrize("kind", DOCUMENTS)
async def test_only_services_publish_what_services_act_on(
    store: StoreHandle, stubs: Stubs, kind: str, role: Role
) -> None:
    await create_project(stubs, MINE)
    for project in (MINE, "projects/*"):
        tenant = await store.stubs(token=store.token(role, project=project))
        with pytest.raises(PermissionDenied, match="role"):
            await tenant.resources.PublishResources(publication(kind, project=MINE))
    assert not (await stubs.resources.ListResourceVersions(res.ListResourceVersionsRequest(project=MINE))).resources


async def test_a_refused_kind_among_others_publishes_nothing(store: StoreHandle, stubs: Stubs) -> None:
    client = await store.stubs(role=Role.CLIENT)
    with pytest.raises(PermissionDenied, match="publish route"):
        await client.resources.PublishResources(publication("prompt", "notes", "route"))
    assert not (await stubs.resources.ListResourceVersions(res.ListResourceVersionsRequest())).resources


async def test_a_client_moves_no_alias_of_what_services_act_on(store: StoreHandle, stubs: Stubs) -> None:
    await stubs.resources.PublishResources(publication("route", "prompt"))
    client = await store.stubs(role=Role.CLIENT)
    for resource in ("prompt.evil", "route.evil"):
        request = res.SetAliasRequest(name=f"resources/{resource}/aliases/best", version=1)
        if resource.startswith("prompt"):
            await client.resources.SetAlias(request)
            continue
        with pytest.raises(PermissionDenied, match="publish route"):
            await client.resources.SetAlias(request)


async def test_a_service_of_one_project_publishes_in_no_other(store: StoreHandle, stubs: Stubs) -> None:
    for project in (MINE, THEIRS):
        await create_project(stubs, project)
    service = await store.stubs(token=store.token(Role.SERVICE, project=MINE))
    await service.resources.PublishResources(publication("route", project=MINE))
    for project in (THEIRS, "projects/default"):
        with pytest.raises(PermissionDenied, match="another project"):
            await service.resources.PublishResources(publication("route", project=project))


@pytest.mark.parametrize("kind", ["Backend", "backend ", "backend\0", "\N{CYRILLIC SMALL LETTER A}gent"])
async def test_a_kind_that_only_looks_like_another_is_refused(store: StoreHandle, kind: str) -> None:
    client = await store.stubs(role=Role.CLIENT)
    with pytest.raises(Exception, match=r"kind|may not"):
        await client.resources.PublishResources(publication(kind))


@pytest.mark.parametrize("name", ["backend.one", "policy.tiny", "route.tiny", "route.", "policy.."])
async def test_a_client_takes_no_id_that_a_service_needs(store: StoreHandle, name: str) -> None:
    """A resource keeps its kind: `route.tiny` of another kind could never be the route of that model."""
    client = await store.stubs(role=Role.CLIENT)
    for kind in ("notes", "prompt", "agent-"):
        version = resource_pb2.ResourceVersion(name=f"resources/{name}", kind=kind, content=b'{"path": "/etc"}')
        with pytest.raises(ArgumentInvalid, match="which is for resources of kind"):
            await client.resources.PublishResources(res.PublishResourcesRequest(resources=[version]))


async def test_weights_are_read_from_no_folder_that_a_client_names() -> None:
    """Readers check the kind, too: it says who may have published a version."""
    content = Content(name="resources/policy.x/versions/1", version=1, data=DOCUMENTS["policy"], kind="notes")
    with pytest.raises(RunFailed, match="is of kind notes"):
        await stored_policy(content, resources=cast("Any", None), files=cast("Any", None), roots=cast("Any", None))
