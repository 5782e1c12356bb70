"""People score rollouts: each one their own scores, of their own project, for as long as the rollout is there."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from fulmen.errors import (
    AnnotationExists,
    AnnotationNotFound,
    ArgumentInvalid,
    PermissionDenied,
    QuotaExceeded,
    RolloutNotFound,
)
from fulmen.ids import parse_rollout_name, rollout_name, uuid7
from fulmen.store.v1 import annotation_service_pb2 as pb
from fulmen.store.v1 import project_service_pb2, rollout_selection_pb2
from fulmen_service_kit.security.tokens import Role
from fulmen_store.annotations import annotations as use_cases
from tests.support.store.running import StoreHandle, Stubs, cancel, create, create_project, pages_of


async def person(
    store: StoreHandle, name: str, *, role: Role = Role.CLIENT, project: str = "projects/default"
) -> Stubs:
    """Returns stubs with the token of a person."""
    return await store.stubs(token=store.token(role, project=project, subject=name))


async def score(stubs: Stubs, rollout: str, value: float = 1, **fields: Any) -> pb.Annotation:
    """Adds a score."""
    annotation = pb.Annotation(rollout=rollout, value=value, **fields)
    answer = await stubs.annotations.CreateAnnotation(pb.CreateAnnotationRequest(annotation=annotation))
    added: pb.Annotation = answer.annotation
    return added


async def listed(stubs: Stubs, **selection: Any) -> list[pb.Annotation]:
    """Returns annotations, newest first."""
    answer = await stubs.annotations.ListAnnotations(pb.ListAnnotationsRequest(**selection))
    return list(answer.annotations)


async def test_a_score_carries_the_name_of_the_token_and_is_listed_newest_first(
    store: StoreHandle, stubs: Stubs
) -> None:
    first, second = await create(stubs, 2)
    ann, bob = await person(store, "ann"), await person(store, "bob")
    one = await score(ann, first, 4, dimension="helpful", comment="close", author="nobody")
    assert (one.author, one.value, one.comment, one.dimension) == ("ann", 4, "close", "helpful")
    assert one.create_time == one.update_time
    two = await score(bob, first, 2)
    assert two.dimension == "reward"
    three = await score(ann, second, 5)
    assert await listed(ann) == [three, two, one]
    assert await listed(ann, rollout=first) == [two, one]
    assert await listed(ann, author="ann", dimension="helpful") == [one]
    reader = await person(store, "eve", role=Role.READER)
    assert await listed(reader, author="bob") == [two]
    with pytest.raises(PermissionDenied):
        await score(reader, first)


async def test_the_same_score_again_is_the_same_annotation_and_another_one_is_refused(
    store: StoreHandle, stubs: Stubs
) -> None:
    (rollout,) = await create(stubs)
    ann = await person(store, "ann")
    added = await score(ann, rollout, 3, comment="fine")
    assert await score(ann, rollout, 3, comment="fine") == added
    with pytest.raises(AnnotationExists) as refused:
        await score(ann, rollout, 4)
    assert refused.value.metadata["annotation"] == added.name
    assert await listed(ann) == [added]


async def test_scores_that_come_at_the_same_moment_do_not_pass_the_limit_of_a_rollout(
    store: StoreHandle, stubs: Stubs, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(use_cases, "MAX_PER_ROLLOUT", 1)
    (rollout,) = await create(stubs)
    rollout_id = parse_rollout_name(rollout).rollout_id
    ann = await person(store, "ann")
    connection, holder = await asyncpg.connect(database_url), await asyncpg.connect(database_url)
    # Both are held where each has seen room for one more, for as long as this transaction has rows of their names.
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute(
        "insert into annotation (id, project_id, rollout_id, dimension, author, value, comment) "
        "select gen_random_uuid(), r.project_id, r.id, d, 'ann', 1, '' from rollout r, unnest($2::text[]) d where r.id = $1",
        rollout_id,
        ["one", "other"],
    )
    calls = [asyncio.ensure_future(score(ann, rollout, dimension=each)) for each in ("one", "other")]
    waiting = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    async with asyncio.timeout(60):
        while await connection.fetchval(waiting) < len(calls):  # noqa: ASYNC110  # of a server
            await asyncio.sleep(0.01)
    await transaction.rollback()
    found = await asyncio.gather(*calls, return_exceptions=True)
    await connection.close()
    await holder.close()
    assert [type(each) for each in found if isinstance(each, Exception)] == [QuotaExceeded]
    assert len(await listed(ann, rollout=rollout)) == 1


async def test_only_its_author_or_an_admin_changes_or_deletes_a_score(store: StoreHandle, stubs: Stubs) -> None:
    (rollout,) = await create(stubs)
    ann, bob = await person(store, "ann"), await person(store, "bob")
    added = await score(ann, rollout, 3, dimension="tone")
    change = pb.UpdateAnnotationRequest(
        annotation=pb.Annotation(name=added.name, value=1, dimension="other", comment="x")
    )
    for refused in (bob.annotations.UpdateAnnotation(change), delete(bob, added.name)):
        with pytest.raises(AnnotationNotFound):
            await refused
    changed = (await ann.annotations.UpdateAnnotation(change)).annotation
    assert (changed.value, changed.comment, changed.dimension, changed.author) == (1, "x", "tone", "ann")
    assert changed.update_time.ToNanoseconds() > changed.create_time.ToNanoseconds()
    assert (await ann.annotations.UpdateAnnotation(change)).annotation == changed
    change.annotation.value = 5
    assert (await stubs.annotations.UpdateAnnotation(change)).annotation.author == "ann"
    await delete(stubs, added.name)
    assert await listed(ann) == []
    with pytest.raises(AnnotationNotFound):
        await delete(ann, added.name)


async def test_a_malformed_score_is_refused_with_every_problem(stubs: Stubs) -> None:
    with pytest.raises(ArgumentInvalid) as refused:
        await score(stubs, "rollouts/1", float("nan"), dimension="Quite Good", comment="x" * 4097)
    assert {violation.field for violation in refused.value.violations} == {
        f"annotation.{field}" for field in ("rollout", "value", "dimension", "comment")
    }
    (rollout,) = await create(stubs)
    for value in (float("inf"), 1.1e9):
        with pytest.raises(ArgumentInvalid):
            await score(stubs, rollout, value)
    longest = await score(stubs, rollout, -1e9, dimension="d" * 64, comment="\N{GRINNING FACE}" * 4096)
    assert longest.comment == "\N{GRINNING FACE}" * 4096


async def test_a_rollout_of_another_project_does_not_exist(store: StoreHandle, stubs: Stubs) -> None:
    await create_project(stubs, "projects/other")
    (rollout,) = await create(stubs)
    added = await score(stubs, rollout)
    other = await person(store, "ann", project="projects/other")
    with pytest.raises(RolloutNotFound):
        await score(other, rollout.replace("projects/default", "projects/other"))
    with pytest.raises(AnnotationNotFound):
        await delete(other, added.name.replace("projects/default", "projects/other"))
    with pytest.raises(PermissionDenied):
        await delete(other, added.name)
    with pytest.raises(RolloutNotFound):
        await score(stubs, rollout_name("projects/default", uuid7()))
    assert await listed(other) == []


async def test_scores_go_with_their_rollout(store: StoreHandle, stubs: Stubs, connection: Any) -> None:
    kept, gone = await create(stubs, 2)
    stays = await score(stubs, kept)
    await score(stubs, gone)
    await cancel(stubs, gone)
    await stubs.rollouts.DeleteRollouts(rollout_selection_pb2.DeleteRolloutsRequest(names=[gone]))
    assert await listed(stubs) == [stays]
    with pytest.raises(RolloutNotFound):
        await score(stubs, gone)
    # Also those that are past their project's retention.
    await cancel(stubs, kept)
    old = uuid7(1_000_000_000_000)
    for table, column in (("rollout", "id"), ("rollout_end", "rollout_id"), ("annotation", "rollout_id")):
        await connection.execute(f"update {table} set {column} = $1", old)
    await connection.execute("update rollout_end set ended_at = '2001-09-09'")
    await connection.execute("update project set retention = interval '1 day'")
    await store.parts.roles["retention"].run_once()
    assert await connection.fetchval("select count(*) from rollout") == 0
    assert await listed(stubs) == []


async def test_a_score_that_is_added_while_its_rollout_is_deleted_does_not_outlive_it(
    stubs: Stubs, connection: Any
) -> None:
    rollouts = await create(stubs, 20)
    for rollout in rollouts:
        await cancel(stubs, rollout)
    request = rollout_selection_pb2.DeleteRolloutsRequest(names=rollouts)
    await asyncio.gather(
        stubs.rollouts.DeleteRollouts(request),
        *(score(stubs, rollout, dimension=f"d{number}") for rollout in rollouts for number in range(5)),
        return_exceptions=True,
    )
    assert await connection.fetchval("select count(*) from rollout") == 0
    assert await connection.fetchval("select count(*) from annotation") == 0


async def test_scores_go_with_their_project(store: StoreHandle, stubs: Stubs, connection: Any) -> None:
    await create_project(stubs, "projects/other")
    (rollout,) = await create(stubs, project="projects/other")
    await score(stubs, rollout)
    await stubs.projects.DeleteProject(project_service_pb2.DeleteProjectRequest(name="projects/other"))
    await connection.execute(
        "update project set deleted_at = deleted_at - interval '1 hour' where deleted_at is not null"
    )
    async with asyncio.timeout(30):
        while await connection.fetchval("select count(*) from project where emptied_at is not null") == 0:
            await store.parts.roles["project-remover"].run_once()
    assert await connection.fetchval("select count(*) from annotation") == 0


async def test_a_list_of_many_scores_has_pages(store: StoreHandle, stubs: Stubs) -> None:
    rollouts = await create(stubs, 7)
    for rollout in rollouts:
        await score(stubs, rollout, comment="\N{GRINNING FACE}" * 4096)
    pages = await pages_of(stubs.annotations.ListAnnotations, pb.ListAnnotationsRequest(page_size=3))
    assert [len(page.annotations) for page in pages] == [3, 3, 1]
    assert [each.rollout for page in pages for each in page.annotations] == rollouts[::-1]


async def test_a_rollout_has_at_most_a_thousand_scores(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(use_cases, "MAX_PER_ROLLOUT", 2)
    (rollout,) = await create(stubs)
    await score(stubs, rollout, dimension="a")
    last = await score(stubs, rollout, dimension="b")
    with pytest.raises(QuotaExceeded):
        await score(stubs, rollout, dimension="c")
    assert await score(stubs, rollout, dimension="b") == last


async def test_agreement_is_of_one_dimension_and_says_who_agrees_with_whom(store: StoreHandle, stubs: Stubs) -> None:
    rollouts = await create(stubs, 5)
    people = [await person(store, name) for name in ("ann", "bob", "cy")]
    given = {"ann": (1, 2, 3, 4, 5), "bob": (1, 2, 3, 4, 5), "cy": (5, 4, 3)}
    for stub, values in zip(people, given.values(), strict=True):
        for rollout, value in zip(rollouts, values, strict=False):
            await score(stub, rollout, value, dimension="tone")
            await score(stub, rollout, 7, dimension="other")
    reader = await person(store, "eve", role=Role.READER)
    found = await reader.annotations.GetAgreement(pb.GetAgreementRequest(dimension="tone"))
    assert [(each.author, each.annotation_count, each.mean) for each in found.authors] == [
        ("ann", 5, 3.0),
        ("bob", 5, 3.0),
        ("cy", 3, 4.0),
    ]
    pairs = {(pair.author, pair.other_author): pair for pair in found.pairs}
    assert (pairs["ann", "bob"].kappa, pairs["ann", "bob"].equal_share) == (1, 1)
    assert pairs["ann", "cy"].kappa < 0
    assert pairs["ann", "cy"].rollout_count == 3
    assert 0 < found.alpha < 1
    assert found.rollout_count == 5
    assert not found.truncated
    nothing = await reader.annotations.GetAgreement(pb.GetAgreementRequest(dimension="other"))
    assert not nothing.HasField("alpha")
    assert not nothing.pairs[0].HasField("kappa")
    with pytest.raises(ArgumentInvalid):
        await reader.annotations.GetAgreement(pb.GetAgreementRequest(dimension="tone", level=9))


async def delete(stubs: Stubs, name: str) -> None:
    """Deletes a score."""
    await stubs.annotations.DeleteAnnotation(pb.DeleteAnnotationRequest(name=name))
