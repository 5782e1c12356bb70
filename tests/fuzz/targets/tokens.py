"""Bearer tokens. An input is `a` or `r` and claims, which are signed with the right key, or any other text as it is."""

from __future__ import annotations

import base64
import hmac
import json
import random

from fulmen_service_kit.security.keys import StoreKeys
from fulmen_service_kit.security.tokens import Role, TokenSigner, TokenVerifier
from tests.fuzz.mutation import mutate_bytes, mutate_json
from tests.fuzz.target import PureTarget

_KEYS = StoreKeys("a signing key of the fuzzer, 32 bytes or more")
_SIGNER = TokenSigner(_KEYS)
_ATTEMPT = "projects/default/rollouts/0190a0b0-1234-7000-8000-00000000abcd/attempts/2"
_OF_ATTEMPT = _SIGNER.attempt_key(
    _ATTEMPT, project="projects/default", lease_id="l", epoch=1, mode="train", ttl_s=10**8
)
_OF_ROLE = _SIGNER.issue(Role.CLIENT, subject="s", ttl_s=10**8)


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _signed(kind: bytes, claims: bytes) -> str:
    """Returns a token of any claims, as only the store could make it."""
    of_attempt = kind == b"a"
    header = (_OF_ATTEMPT if of_attempt else _OF_ROLE).split(".")[0].encode()
    signed = header + b"." + _base64url(claims)
    if of_attempt:
        signature = hmac.digest(_KEYS.current().attempts[0], signed, "sha256")
    else:
        signature = _KEYS.signing().sign(signed)
    return (signed + b"." + _base64url(signature)).decode()


def run(data: bytes) -> None:
    """Verifies a token; one that is accepted names a caller."""
    kind = data[:1]
    token = _signed(kind, data[1:]) if kind in (b"a", b"r") else data.decode("utf-8", "surrogateescape")
    caller = TokenVerifier(_KEYS, clock=lambda: 1.8e9).verify(token)
    assert (caller.attempt is not None) == (caller.role is Role.ATTEMPT)
    caller.may_access("projects/default")


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes the claims, or the bytes of a token."""
    if data[:1] in (b"a", b"r") and rng.random() < 0.9:
        return data[:1] + mutate_json(data[1:], rng)
    return mutate_bytes(data, rng)


def _claims(token: str) -> bytes:
    payload = token.split(".")[1]
    claims = json.loads(base64.urlsafe_b64decode(payload + "=="))
    return json.dumps(claims | {"iat": 1_800_000_000, "exp": 1_800_000_100}).encode()


TARGET = PureTarget(
    run=run,
    seeds=[b"a" + _claims(_OF_ATTEMPT), b"r" + _claims(_OF_ROLE), b"eyJ.e30.AAAA", b"."],
    mutate=mutate,
)
