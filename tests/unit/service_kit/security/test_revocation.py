"""A revoked token is refused at once where it was revoked, and wherever the list of revoked tokens is followed."""

from collections.abc import Iterable

import jwt
import pytest

from fulmen.errors import TokenInvalid, Unavailable
from fulmen_service_kit.security.revocation import FollowedClock, RevocationFollower, RevokedTokens
from fulmen_service_kit.security.tokens import RUN_ROLES, Role, TokenSigner, TokenVerifier

KEY = "k" * 32


def token_and_id(role: Role = Role.CLIENT) -> tuple[str, str]:
    token = TokenSigner(KEY).issue(role, subject="ann", ttl_s=60)
    return token, str(jwt.decode(token, options={"verify_signature": False})["jti"])


def test_every_token_has_an_id_of_22_characters() -> None:
    first, second = token_and_id(), token_and_id()

    assert len(first[1]) == len(second[1]) == 22
    assert first[1] != second[1]
    assert TokenVerifier(KEY).verify(first[0]).token_id == first[1]


def test_a_token_that_was_good_before_is_refused_once_it_is_revoked() -> None:
    revoked = RevokedTokens()
    verifier = TokenVerifier(KEY, revoked=revoked)
    token, token_id = token_and_id()
    caller = verifier.verify(token)

    revoked.add(token_id)

    with pytest.raises(TokenInvalid, match="revoked"):
        verifier.verify(token)
    with pytest.raises(TokenInvalid, match="revoked"):
        verifier.check(caller)
    assert verifier.verify(token_and_id()[0])


async def test_a_follower_keeps_what_it_knows_while_the_source_is_away() -> None:
    revoked = RevokedTokens()
    answers: list[Iterable[str] | Exception] = [["a", "b"], Unavailable("away"), TimeoutError(), ["b"]]

    async def fetch() -> Iterable[str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    follower = RevocationFollower(revoked=revoked, fetch=fetch)
    seen = []
    for _ in range(4):
        await follower.follow_once()
        seen.append(("a" in revoked, "b" in revoked))
    assert seen == [(True, True), (True, True), (True, True), (False, True)]


async def test_a_list_that_was_on_its_way_does_not_bring_a_revoked_token_back() -> None:
    revoked = RevokedTokens()

    async def fetch() -> Iterable[str]:
        revoked.add("just now")
        return []

    await RevocationFollower(revoked=revoked, fetch=fetch).follow_once()

    assert "just now" in revoked


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.ATTEMPT])
def test_no_role_reaches_further_than_its_token(role: Role) -> None:
    run = "projects/a/trainingRuns/r" if role in RUN_ROLES else ""
    token = TokenSigner(KEY).issue(role, subject="ann", ttl_s=60, project="projects/a", training_run=run)

    caller = TokenVerifier(KEY).verify(token)

    assert caller.may_access("projects/a")
    assert not caller.may_access("projects/b")
    assert not caller.may_access("projects/*")
    assert caller.own_project == "projects/a"


def test_services_reach_every_project_by_default_and_people_the_default_one() -> None:
    reach = {
        role: TokenVerifier(KEY).verify(TokenSigner(KEY).issue(role, subject="x", ttl_s=60)).project
        for role in Role
        if role not in (Role.ATTEMPT, *RUN_ROLES)
    }

    assert reach == {
        Role.ADMIN: "projects/*",
        Role.SERVICE: "projects/*",
        Role.RUNNER: "projects/*",
        Role.CLIENT: "projects/default",
        Role.READER: "projects/default",
    }


def test_a_clock_that_is_followed_does_not_jump_with_this_machines() -> None:
    wall_s, monotonic_s = 1000.0, 5.0
    clock = FollowedClock(wall=lambda: wall_s, monotonic=lambda: monotonic_s)
    assert clock() == 1000.0

    clock.observe(2000.0, took_s=2.0)
    assert (clock(), clock.skew_s) == (2001.0, -1001.0)

    wall_s, monotonic_s = wall_s + 3600, monotonic_s + 1
    assert clock() == 2002.0
