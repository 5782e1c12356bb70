"""Services' tokens are short-lived: their holders refresh them, nobody else can, and a revocation ends them all."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import asyncpg
import pytest

from fulmen.errors import PermissionDenied, ProjectNotFound, TokenInvalid
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import project_service_pb2 as prj
from fulmen.watched_file import WatchedFile
from fulmen_algorithm.clients.rank_tokens import RankTokens
from fulmen_service_kit.errors import StartupError
from fulmen_service_kit.security.held_token import HeldToken, TokenRefresher
from fulmen_service_kit.security.secret import Secret
from fulmen_service_kit.security.tokens import Role, TokenSigner, TokenVerifier
from tests.support.service_kit.key_store import KeyService, serving_keys
from tests.support.store.running import SIGNING_KEY, StoreHandle, Stubs, create_project, running_store

DAY_S = 86_400
LIMIT_S = 20


async def refreshed(store: StoreHandle, token: str, *, project: str = "") -> prj.RefreshTokenResponse:
    stubs = await store.stubs(token=token)
    answer: prj.RefreshTokenResponse = await stubs.projects.RefreshToken(prj.RefreshTokenRequest(project=project))
    return answer


async def issued(stubs: Stubs, role: int, *, project: str = "projects/*", ttl_s: int = 3600) -> prj.IssueTokenResponse:
    request = prj.IssueTokenRequest(project=project, role=role, subject="one")  # type: ignore[arg-type]
    request.ttl.FromSeconds(ttl_s)
    answer: prj.IssueTokenResponse = await stubs.projects.IssueToken(request)
    return answer


@pytest.mark.parametrize("role", [prj.TOKEN_ROLE_SERVICE, prj.TOKEN_ROLE_RUNNER])
async def test_a_service_gets_a_token_that_is_its_own_but_for_the_time(
    store: StoreHandle, stubs: Stubs, role: int
) -> None:
    first = await issued(stubs, role)
    answer = await refreshed(store, first.token)
    old, new = (TokenVerifier(SIGNING_KEY).verify(each) for each in (first.token, answer.token))
    assert (new.role, new.subject, new.project, new.token_id) == (old.role, old.subject, old.project, old.token_id)
    assert new.expires_s - new.issued_s == old.expires_s - old.issued_s == 3600
    assert abs(answer.expire_time.seconds - new.expires_s) <= 1


@pytest.mark.parametrize("role", [Role.ADMIN, Role.CLIENT, Role.READER])
async def test_the_token_of_a_person_ends_when_it_was_meant_to(store: StoreHandle, role: Role) -> None:
    with pytest.raises(PermissionDenied):
        await refreshed(store, store.token(role))


async def test_a_token_lives_no_longer_than_thirty_days_after_a_refresh(store: StoreHandle) -> None:
    token = TokenSigner(SIGNING_KEY).issue(Role.RUNNER, subject="old", ttl_s=3650 * DAY_S)
    new = TokenVerifier(SIGNING_KEY).verify((await refreshed(store, token)).token)
    assert new.expires_s - time.time() <= 30 * DAY_S + 5


async def test_a_token_reaches_less_if_it_is_asked_for_and_never_more(store: StoreHandle, stubs: Stubs) -> None:
    for name in ("projects/a", "projects/b"):
        await create_project(stubs, name)
    of_all = store.token(Role.SERVICE)
    of_a = (await refreshed(store, of_all, project="projects/a")).token
    assert TokenVerifier(SIGNING_KEY).verify(of_a).project == "projects/a"
    for wider in ("projects/b", "projects/*"):
        with pytest.raises(PermissionDenied):
            await refreshed(store, of_a, project=wider)
    with pytest.raises(ProjectNotFound):
        await refreshed(store, of_all, project="projects/none")


async def test_revoking_a_token_ends_everything_that_came_of_it(store: StoreHandle, stubs: Stubs) -> None:
    await create_project(stubs, "projects/a")
    first = await issued(stubs, prj.TOKEN_ROLE_SERVICE)
    second = (await refreshed(store, first.token)).token
    third = (await refreshed(store, second, project="projects/a")).token
    await stubs.projects.RevokeToken(prj.RevokeTokenRequest(token_id=first.token_id))
    for token in (first.token, second, third):
        with pytest.raises(TokenInvalid, match="revoked"):
            await refreshed(store, token)


async def test_a_replica_that_has_not_heard_of_a_revocation_refreshes_nothing(database_url: str) -> None:
    async with running_store(database_url) as one, running_store(database_url) as other:
        stubs = await one.stubs()
        token = await issued(stubs, prj.TOKEN_ROLE_RUNNER)
        await refreshed(other, token.token)
        await stubs.projects.RevokeToken(prj.RevokeTokenRequest(token_id=token.token_id))
        with pytest.raises(TokenInvalid, match="revoked"):
            await refreshed(other, token.token)


async def test_a_project_that_revokes_without_end_revives_no_token_of_another(
    store: StoreHandle, stubs: Stubs, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fulmen_store.projects.table.MAX_REVOKED", 10)
    await create_project(stubs, "projects/a")
    victims = [await issued(stubs, prj.TOKEN_ROLE_RUNNER, project=project) for project in ("projects/a", "projects/*")]
    for victim in victims:
        await stubs.projects.RevokeToken(prj.RevokeTokenRequest(token_id=victim.token_id))
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        "insert into issued_token (id, project, role, subject, expires_at, revoked_at)"
        " select lpad(n::text, 22, '0'), 'projects/eve', 4, 'eve', now() + interval '9 years', now()"
        " from generate_series(1, 20) n"
    )
    await connection.close()
    for project in (None, "projects/a"):
        service = await store.stubs(role=Role.SERVICE, project=project)
        listed = (await service.projects.ListRevokedTokens(prj.ListRevokedTokensRequest())).token_ids
        assert {victim.token_id for victim in victims} <= {*listed}


async def test_a_token_signed_without_the_store_can_be_revoked_once_it_was_refreshed(
    store: StoreHandle, stubs: Stubs
) -> None:
    token = store.token(Role.RUNNER, subject="by hand")
    await refreshed(store, token)
    [listed] = [
        each for each in (await stubs.projects.ListTokens(prj.ListTokensRequest())).tokens if each.subject == "by hand"
    ]
    await stubs.projects.RevokeToken(prj.RevokeTokenRequest(token_id=listed.token_id))
    with pytest.raises(TokenInvalid, match="revoked"):
        await refreshed(store, token)


async def test_a_refresh_is_written_to_the_audit_log_without_the_token(database_url: str, tmp_path: Path) -> None:
    file = tmp_path / "audit.log"
    async with running_store(database_url, audit_file=str(file)) as store:
        answer = await refreshed(store, store.token(Role.RUNNER))
    [line] = [json.loads(each) for each in file.read_text().splitlines()]
    assert (line["rpc"].rpartition("/")[2], line["code"], line["role"]) == ("RefreshToken", "OK", "runner")
    assert answer.token not in file.read_text()


def held(path: Path, token: str) -> HeldToken:
    path.write_text(token + "\n")
    path.chmod(0o600)
    return HeldToken(Secret(file=WatchedFile(path)))


@pytest.fixture(autouse=True)
def every_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at whenever they are asked for."""
    monkeypatch.setattr("fulmen.watched_file.LOOK_S", 0.0)


def half_spent(*, ttl_s: float = 600) -> str:
    """Returns a token of role runner that is due for a refresh."""
    return TokenSigner(SIGNING_KEY).issue(Role.RUNNER, subject="r", ttl_s=ttl_s)


async def test_a_holder_keeps_its_file_fresh_and_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "runner.token"
    first = half_spent(ttl_s=8)
    async with serving_keys(KeyService(SIGNING_KEY)) as target, asyncio.timeout(LIMIT_S):
        token = held(path, first)
        async with open_channel(target, token=token) as channel:
            running = asyncio.create_task(TokenRefresher(token, channel).run())
            while path.read_text().strip() == first:  # noqa: ASYNC110  # a file
                await asyncio.sleep(0.01)
            running.cancel()
    assert token() == path.read_text().strip() != first
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["runner.token"]
    assert HeldToken(Secret(file=WatchedFile(path)))() == token()


async def test_ranks_have_a_fresh_token_of_their_project_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fulmen_algorithm.clients.rank_tokens.INTERVAL_S", 0.01)
    own = TokenSigner(SIGNING_KEY).issue(Role.SERVICE, subject="algorithm", ttl_s=4, token_id="f" * 22)
    async with (
        asyncio.timeout(LIMIT_S),
        serving_keys(KeyService(SIGNING_KEY)) as target,
        open_channel(target, token=own) as channel,
    ):
        tokens = RankTokens(channel, folder=tmp_path / "rank-tokens", outage_limit_s=5)
        file = await tokens.file_of("projects/a")
        first = file.read_text()
        caller = TokenVerifier(SIGNING_KEY).verify(first)
        assert (caller.role, caller.project, caller.token_id) == (Role.SERVICE, "projects/a", "f" * 22)
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
        assert await tokens.file_of("projects/a") == file
        keeping = asyncio.create_task(tokens.run())
        while file.read_text() == first:  # noqa: ASYNC110  # a file
            await asyncio.sleep(0.01)
        keeping.cancel()
    assert TokenVerifier(SIGNING_KEY).verify(file.read_text()).project == "projects/a"


async def test_a_token_that_the_operator_puts_into_the_file_takes_effect(tmp_path: Path) -> None:
    path = tmp_path / "runner.token"
    token = held(path, half_spent())
    token.replace(half_spent(ttl_s=700))
    theirs = half_spent(ttl_s=800)
    path.write_text(theirs)
    assert token() == theirs


async def test_a_holder_writes_nothing_over_a_mounted_secret(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "runner.token"
    real.write_text(half_spent())
    link.symlink_to(real)
    token = HeldToken(Secret(file=WatchedFile(link)))
    before, fresh = token(), half_spent(ttl_s=700)
    token.replace(fresh)
    assert token() == fresh
    assert (link.is_symlink(), real.read_text()) == (True, before)


async def test_a_store_that_is_away_costs_nothing_but_time(tmp_path: Path) -> None:
    keys = KeyService(SIGNING_KEY)
    token = held(tmp_path / "t", half_spent())
    before = token()
    async with open_channel("127.0.0.1:1", token=token) as channel:
        await TokenRefresher(token, channel).refresh()
    assert token() == before
    async with serving_keys(keys) as target, open_channel(target, token=token) as channel:
        await TokenRefresher(token, channel).refresh()
    assert token() != before


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0], ids=["an hour ahead", "an hour behind"])
def test_a_fresh_token_is_refreshed_at_half_of_its_validity_whatever_the_clock_says(ahead_s: float) -> None:
    monotonic_s = 0.0
    token = HeldToken(Secret(""), clock=lambda: time.time() + ahead_s, monotonic=lambda: monotonic_s)
    token.replace(half_spent(ttl_s=600))
    assert token.wait_s == 300
    monotonic_s = 301.0
    assert token.wait_s < 0


def test_a_clock_that_falls_behind_delays_no_refresh_beyond_half_of_the_validity() -> None:
    monotonic_s = 0.0
    token = HeldToken(Secret(half_spent(ttl_s=600)), clock=lambda: time.time() - 3600, monotonic=lambda: monotonic_s)
    assert 0 < token.wait_s <= 300
    monotonic_s = 301.0
    assert token.wait_s < 0


@pytest.mark.parametrize("role", ["runner", "service"])
def test_a_service_with_an_expired_token_says_what_to_do(role: str) -> None:
    token = TokenSigner(SIGNING_KEY).issue(Role(role), subject="r", ttl_s=-5)
    with pytest.raises(StartupError, match=f"token expired at .* UTC.*`fulmen token issue --role {role}`") as caught:
        HeldToken(Secret(token))
    assert token not in str(caught.value)


@pytest.mark.parametrize("text", ["", "x", "a.b.c", "a.e30.c", "é.é.é"])
def test_what_is_no_token_is_held_as_it_is(text: str) -> None:
    token = HeldToken(Secret(text))
    assert token() == text
    assert token.wait_s > 0
    assert repr(token) == "HeldToken('**********')"
