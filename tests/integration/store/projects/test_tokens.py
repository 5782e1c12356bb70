"""Tokens are shown once, listed and revoked by id, refused everywhere once revoked, and never written anywhere."""

from __future__ import annotations

import asyncio
import traceback
from typing import Any

import asyncpg
import pytest
from structlog.testing import capture_logs

from fulmen.errors import (
    ArgumentInvalid,
    FulmenError,
    PermissionDenied,
    ProjectNotFound,
    TokenInvalid,
    TokenNotFound,
    Unavailable,
)
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import project_service_pb2 as pb
from fulmen.store.v1 import rollout_service_pb2, span_service_pb2
from fulmen_service_kit.security.keys import PublishedKeys
from fulmen_service_kit.security.revocation import FollowedClock, RevocationFollower, RevokedTokens, followed_at_store
from fulmen_service_kit.security.tokens import Role, TokenSigner, TokenVerifier
from tests.support.store.running import (
    LIMIT_S,
    SIGNING_KEY,
    Runner,
    StoreHandle,
    Stubs,
    create,
    create_project,
    pages_of,
    running_store,
)

REVOCATION_LIMIT_S = 5.0
MINUTE_S = 60


async def issue(stubs: Stubs, role: int = pb.TOKEN_ROLE_CLIENT, **fields: Any) -> pb.IssueTokenResponse:
    values = {"project": "projects/default", "role": role, "subject": "ann"} | fields
    response: pb.IssueTokenResponse = await stubs.projects.IssueToken(pb.IssueTokenRequest(**values))
    return response


async def listed(stubs: Stubs, **selection: Any) -> list[pb.TokenInfo]:
    return list((await stubs.projects.ListTokens(pb.ListTokensRequest(**selection))).tokens)


@pytest.mark.parametrize("role", [Role.ADMIN, Role.SERVICE, Role.RUNNER, Role.CLIENT, Role.READER])
async def test_a_token_says_what_was_asked_for(stubs: Stubs, role: Role) -> None:
    await create_project(stubs, "projects/a")
    number = pb.TokenRole.Value(f"TOKEN_ROLE_{role.name}")
    issued = await issue(stubs, number, project="projects/a", ttl={"seconds": MINUTE_S})
    caller = TokenVerifier(SIGNING_KEY).verify(issued.token)
    assert (caller.role, caller.project, caller.subject) == (role, "projects/a", "ann")
    assert caller.token_id == issued.token_id == issued.info.token_id
    assert issued.info.role == number
    assert issued.info.expire_time.seconds - issued.info.create_time.seconds == MINUTE_S
    assert not issued.info.HasField("revoke_time")


async def test_every_problem_is_told_at_once(stubs: Stubs) -> None:
    with pytest.raises(ArgumentInvalid) as refused:
        await issue(stubs, 0, project="nonsense", subject="", ttl={"seconds": 1})
    assert {violation.field for violation in refused.value.violations} == {"project", "role", "subject", "ttl"}
    for role in (7, 99, -1):
        with pytest.raises(ArgumentInvalid):
            await issue(stubs, role)
    with pytest.raises(ProjectNotFound):
        await issue(stubs, project="projects/none")


async def test_tokens_are_listed_newest_first_without_their_secret(stubs: Stubs) -> None:
    await create_project(stubs, "projects/a")
    issued = [await issue(stubs, subject=f"s{n}", project=("projects/default", "projects/a")[n % 2]) for n in range(5)]
    pages = await pages_of(stubs.projects.ListTokens, pb.ListTokensRequest(page_size=2))
    found = [info for page in pages for info in page.tokens]
    assert found == [one.info for one in reversed(issued)]
    assert [info.subject for info in await listed(stubs, project="projects/a")] == ["s3", "s1"]
    everything = "".join(map(str, found))
    assert not any(one.token in everything for one in issued)


async def test_a_revoked_token_is_refused_at_once_here_and_soon_by_every_replica(
    store: StoreHandle, stubs: Stubs, database_url: str
) -> None:
    issued = await issue(stubs)
    async with running_store(database_url) as replica:
        here, there = await store.stubs(token=issued.token), await replica.stubs(token=issued.token)
        await create(here)
        await create(there)
        for _ in range(2):
            await stubs.projects.RevokeToken(pb.RevokeTokenRequest(token_id=issued.token_id))
        with pytest.raises(TokenInvalid, match="revoked"):
            await create(here)
        async with asyncio.timeout(REVOCATION_LIMIT_S):
            while True:
                try:
                    await create(there)
                except TokenInvalid:
                    break
    (info,) = await listed(stubs)
    assert info.HasField("revoke_time")
    answer = await stubs.projects.ListRevokedTokens(pb.ListRevokedTokensRequest())
    assert list(answer.token_ids) == [issued.token_id]
    for token_id in ("", "x" * 22, "x" * 5000, "ü" * 22):
        with pytest.raises(TokenNotFound):
            await stubs.projects.RevokeToken(pb.RevokeTokenRequest(token_id=token_id))


async def test_a_service_that_checks_tokens_by_itself_hears_of_a_revocation(store: StoreHandle, stubs: Stubs) -> None:
    issued = await issue(stubs)
    revoked, keys, clock = RevokedTokens(), PublishedKeys(), FollowedClock()
    verifier = TokenVerifier(keys, revoked=revoked, clock=clock)
    with pytest.raises(Unavailable):
        verifier.verify(issued.token)
    async with open_channel(store.target, token=store.token(Role.SERVICE)) as channel:
        follower = RevocationFollower(revoked=revoked, fetch=followed_at_store(channel, keys=keys, clock=clock))
        await follower.follow_once()
        verifier.verify(issued.token)
        await stubs.projects.RevokeToken(pb.RevokeTokenRequest(token_id=issued.token_id))
        await follower.follow_once()
        with pytest.raises(TokenInvalid, match="revoked"):
            verifier.verify(issued.token)


async def test_an_open_stream_gets_nothing_more_once_its_token_is_revoked(store: StoreHandle, stubs: Stubs) -> None:
    issued = await issue(stubs, pb.TOKEN_ROLE_RUNNER, project="projects/*")
    revoked = await store.stubs(token=issued.token)
    runner = await Runner(revoked).open()
    await runner.demand(1)
    spans = revoked.spans.AppendSpans()
    await stubs.projects.RevokeToken(pb.RevokeTokenRequest(token_id=issued.token_id))
    await create(stubs)
    with pytest.raises(TokenInvalid):
        await runner.read()
    await spans.write(span_service_pb2.AppendSpansRequest())
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(TokenInvalid):
            await spans.read()


async def test_what_a_token_of_one_project_issues_reaches_no_further(store: StoreHandle, stubs: Stubs) -> None:
    await create_project(stubs, "projects/a")
    await create_project(stubs, "projects/b")
    foreign = await issue(stubs, project="projects/b")
    wide = await issue(stubs, pb.TOKEN_ROLE_SERVICE, project="projects/*")
    bound = await store.stubs(role=Role.ADMIN, project="projects/a")
    own = await issue(bound, project="projects/a")
    for project in ("projects/b", "projects/*", "projects/none"):
        with pytest.raises(ProjectNotFound):
            await issue(bound, pb.TOKEN_ROLE_ADMIN, project=project)
    for token_id in (foreign.token_id, wide.token_id):
        with pytest.raises(TokenNotFound):
            await bound.projects.RevokeToken(pb.RevokeTokenRequest(token_id=token_id))
    assert [info.token_id for info in await listed(bound)] == [own.token_id]
    with pytest.raises(PermissionDenied):
        await listed(bound, project="projects/b")
    for issued in (foreign, wide):
        await stubs.projects.RevokeToken(pb.RevokeTokenRequest(token_id=issued.token_id))
    service = await store.stubs(role=Role.SERVICE, project="projects/a")
    answer = await service.projects.ListRevokedTokens(pb.ListRevokedTokensRequest())
    assert list(answer.token_ids) == [wide.token_id]


async def test_a_request_that_names_no_project_means_that_of_its_token(store: StoreHandle, stubs: Stubs) -> None:
    await create_project(stubs, "projects/a")
    for role in (Role.CLIENT, Role.SERVICE, Role.ADMIN):
        bound = await store.stubs(role=role, project="projects/a")
        (name,) = await create(bound)
        page = await bound.rollouts.ListRollouts(rollout_service_pb2.ListRolloutsRequest())
        assert name in [rollout.name for rollout in page.rollouts]
        assert {rollout.project for rollout in page.rollouts} == {"projects/a"}
        with pytest.raises(PermissionDenied):
            await create(bound, project="projects/default")


async def test_a_runner_of_one_project_gets_work_of_that_project_only(store: StoreHandle, stubs: Stubs) -> None:
    await create_project(stubs, "projects/a")
    (other,) = await create(stubs)
    (own,) = await create(stubs, project="projects/a")
    bound = await Runner(await store.stubs(role=Role.RUNNER, project="projects/a")).open()
    wide = await Runner(stubs).open()
    await bound.demand(2)
    assert [one.rollout.name for one in (await bound.expect("assign")).assignments] == [own]
    assert [one.rollout.name for one in await wide.take(1)] == [other]


async def test_a_service_issues_tokens_for_engines_of_runs_alone(store: StoreHandle, stubs: Stubs) -> None:
    await create_project(stubs, "projects/a")
    service = await store.stubs(role=Role.SERVICE, project="projects/a")
    run = {"subject": "ray-0", "training_run": "projects/a/trainingRuns/r"}
    assert (await issue(service, pb.TOKEN_ROLE_ENGINE, project="projects/a", **run)).token
    for role in (pb.TOKEN_ROLE_CLIENT, pb.TOKEN_ROLE_SERVICE, pb.TOKEN_ROLE_ADMIN):
        with pytest.raises(PermissionDenied):
            await issue(service, role, project="projects/a")
    elsewhere = {"subject": "ray-0", "training_run": "projects/default/trainingRuns/r"}
    with pytest.raises(FulmenError):
        await issue(service, pb.TOKEN_ROLE_ENGINE, project="projects/default", **elsewhere)


async def test_no_token_is_written_to_logs_errors_or_the_database(
    store: StoreHandle, stubs: Stubs, connection: asyncpg.Connection, capfd: pytest.CaptureFixture[str]
) -> None:
    issued = await issue(stubs)
    revoked = await issue(stubs)
    await stubs.projects.RevokeToken(pb.RevokeTokenRequest(token_id=revoked.token_id))
    expired = TokenSigner(SIGNING_KEY).issue(Role.CLIENT, subject="ann", ttl_s=-5)
    forged = TokenSigner("another key, also of 32 bytes or more").issue(Role.ADMIN, subject="ann", ttl_s=60)
    texts: list[str] = []
    with capture_logs() as logs:
        for token in (issued.token, revoked.token, expired, forged, issued.token + "x", f"{issued.token} {forged}"):
            caller = await store.stubs(token=token)
            for call in (
                lambda stubs=caller: create(stubs, project="projects/other"),
                lambda stubs=caller: create(stubs, request_id="nul \0"),
                lambda stubs=caller: stubs.projects.ListTokens(pb.ListTokensRequest()),
                lambda stubs=caller: Runner(stubs).open(),
            ):
                try:
                    await call()
                except FulmenError as error:
                    texts += [repr(error), str(error), str(error.metadata), "".join(traceback.format_exception(error))]
            texts.append(repr(caller))
        texts.append(repr(logs))
    assert len(logs) > 10
    texts += capfd.readouterr()
    texts += [repr(TokenVerifier(SIGNING_KEY)), repr(TokenSigner(SIGNING_KEY)), repr(store.parts)]
    texts.append(await _everything_stored(connection))
    secrets = [issued.token, revoked.token, expired, forged, SIGNING_KEY]
    secrets += [token.rsplit(".", 1)[1] for token in secrets[:4]]
    for secret in secrets:
        assert not any(secret in text for text in texts)


async def _everything_stored(connection: asyncpg.Connection) -> str:
    tables = await connection.fetch("select tablename from pg_tables where schemaname = 'public'")
    rows = [row[0] for (table,) in tables for row in await connection.fetch(f'select t::text from "{table}" t')]
    assert any("ann" in row for row in rows)
    return "\n".join(rows)
