"""Tokens say who calls, and nothing can be changed in them."""

import base64
import hashlib
import hmac
import json
import time
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen.errors import TokenInvalid
from fulmen.ids import DEFAULT_PROJECT, AttemptName
from fulmen_service_kit.security.call_terms import NO_TERMS, CallTerms
from fulmen_service_kit.security.tokens import Role, TokenSigner, TokenVerifier

KEY = "k" * 32
ATTEMPT = AttemptName(project=DEFAULT_PROJECT, rollout_id=uuid.UUID(int=7), number=2)


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


def test_an_attempt_key_carries_the_terms_of_its_calls_only_when_it_has_some() -> None:
    def key(terms: CallTerms = NO_TERMS) -> str:
        return TokenSigner(KEY).attempt_key(
            ATTEMPT, project="projects/p", lease_id="s1", epoch=2, mode="train", ttl_s=60, terms=terms
        )

    terms = CallTerms(
        token_budget=5000, training_run='projects/p/trainingRuns/"r', agent="resources/a/versions/3", continues=2
    )
    assert TokenVerifier(KEY).verify(key(terms)).terms == terms
    assert TokenVerifier(KEY).verify(key()).terms == NO_TERMS
    assert b'"bud"' not in base64.urlsafe_b64decode(key().split(".")[1] + "==")


@given(place=st.integers(min_value=0), bit=st.integers(0, 6))
def test_a_token_with_one_bit_flipped_is_refused(place: int, bit: int) -> None:
    text = bytearray(TokenSigner(KEY).issue(Role.CLIENT, subject="ann", ttl_s=60).encode())
    text[place % len(text)] ^= 1 << bit

    with pytest.raises(TokenInvalid) as raised:
        TokenVerifier(KEY).verify(text.decode())

    assert raised.value.metadata["problem"] == "forged"


@pytest.mark.parametrize("algorithm", ["none", "HS512"])
def test_only_the_one_algorithm_counts_even_when_the_signature_is_good(algorithm: str) -> None:
    claims = {"role": "admin", "sub": "eve", "prj": "projects/*", "iss": "fulmen", "exp": int(time.time()) + 60}
    signed = b".".join(_base64url(json.dumps(part).encode()) for part in ({"alg": algorithm, "typ": "JWT"}, claims))
    good = _base64url(hmac.digest(KEY.encode(), signed, hashlib.sha256))
    for signature in (good, b""):
        with pytest.raises(TokenInvalid):
            TokenVerifier(KEY).verify((signed + b"." + signature).decode())


def test_the_problem_of_a_token_is_named() -> None:
    signer, verifier = TokenSigner(KEY), TokenVerifier(KEY, revoked={"gone"})
    tokens = {
        "missing": "",
        "forged": "x",
        "expired": signer.issue(Role.CLIENT, subject="ann", ttl_s=-1),
        "revoked": signer.issue(Role.CLIENT, subject="ann", ttl_s=60, token_id="gone"),
    }
    for problem, token in tokens.items():
        with pytest.raises(TokenInvalid) as raised:
            verifier.verify(token)
        assert raised.value.metadata == {"problem": problem}


def test_a_caller_says_when_its_token_expires() -> None:
    before = int(time.time())

    caller = TokenVerifier(KEY).verify(TokenSigner(KEY).issue(Role.CLIENT, subject="ann", ttl_s=60))

    assert before + 60 <= caller.expires_s <= time.time() + 60


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
