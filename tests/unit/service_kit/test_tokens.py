"""Tokens say who calls, and nothing can be changed in them."""

import uuid

import pytest

from fulmen.errors import TokenInvalid
from fulmen.ids import AttemptName
from fulmen_service_kit.tokens import Role, TokenSigner, TokenVerifier

KEY = "k" * 32
ATTEMPT = AttemptName(rollout_id=uuid.UUID(int=7), number=2)


def test_an_attempt_key_names_its_attempt_and_lease() -> None:
    key = TokenSigner(KEY).attempt_key(ATTEMPT, project="projects/p", lease_id="s1", epoch=2, mode="train", ttl_s=60)

    caller = TokenVerifier(KEY).verify(key)

    assert (caller.role, caller.attempt, caller.lease_id, caller.epoch, caller.mode) == (
        Role.ATTEMPT,
        ATTEMPT,
        "s1",
        2,
        "train",
    )


def test_an_expired_token_is_refused_even_if_it_was_good_before() -> None:
    verifier = TokenVerifier(KEY)
    token = TokenSigner(KEY).issue(Role.CLIENT, subject="ann", ttl_s=-1)

    with pytest.raises(TokenInvalid, match="expired"):
        verifier.verify(token)


@pytest.mark.parametrize("change", [lambda t: t[:-2], lambda t: t + "x", lambda t: "", lambda t: "a.b.c"])
def test_a_token_that_was_changed_is_refused(change: object) -> None:
    token = TokenSigner(KEY).issue(Role.CLIENT, subject="ann", ttl_s=60)

    with pytest.raises(TokenInvalid):
        TokenVerifier(KEY).verify(change(token))  # type: ignore[operator]  # a lambda of the parametrisation


def test_a_client_reaches_its_own_project_only() -> None:
    token = TokenSigner(KEY).issue(Role.CLIENT, subject="ann", ttl_s=60, project="projects/a")

    caller = TokenVerifier(KEY).verify(token)

    assert caller.may_access("projects/a")
    assert not caller.may_access("projects/b")
