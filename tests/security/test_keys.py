"""What a service holds signs nothing that it should not: keys, algorithms, clocks and malformed claims."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fulmen.errors import FulmenError, TokenInvalid
from fulmen.ids import DEFAULT_PROJECT, AttemptName, uuid7
from fulmen.rpc.channel import open_channel
from fulmen.store.v1 import project_service_pb2 as prj
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.store.v1.project_service_pb2_grpc import ProjectServiceStub
from fulmen_service_kit.security.keys import RoleKey, StoreKeys, attempt_secrets
from fulmen_service_kit.security.tokens import Role, TokenSigner
from tests.support.llm_proxy.harness import RunningProxy, running_proxy
from tests.support.service_kit.key_store import KeyService, serving_keys
from tests.support.store.running import SIGNING_KEY, Runner, StoreHandle, Stubs, create, running_store

ALLOWED = 3
HEADER = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').rstrip(b"=")
ADMIN = {"role": "admin", "sub": "eve", "prj": "projects/*", "jti": "x" * 22, "iss": "fulmen", "iat": 1, "exp": 2**33}
ATTEMPT = str(AttemptName(project=DEFAULT_PROJECT, rollout_id=uuid7(), number=1))


def text_of(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def mac_token(secret: bytes, claims: object, *, header: bytes = HEADER) -> str:
    """Makes a token as an attempt key is made, of any claims."""
    signed = header + b"." + text_of(json.dumps(claims).encode())
    return (signed + b"." + text_of(hmac.digest(secret, signed, "sha256"))).decode()


def signed_token(key: RoleKey, claims: object, *, header: bytes | None = None) -> str:
    """Makes a token as a role token is made, of any claims."""
    signed = (key.header if header is None else header) + b"." + text_of(json.dumps(claims).encode())
    return (signed + b"." + text_of(key.sign(signed))).decode()


def respelled(key: RoleKey) -> Iterator[tuple[str, str]]:
    """Yields tokens that the store's key signed, in spellings that the store never makes; each would be a second token."""
    claims = {**ADMIN, "iat": int(time.time())}
    good = signed_token(key, claims)
    header, payload, signature = good.split(".")
    fields = json.loads(base64.urlsafe_b64decode(header + "=="))
    for extra in ({"crit": ["exp"]}, {"b64": False, "crit": ["b64"]}, {"kid": "../../dev/null"}, {"alg": "eddsa"}, {}):
        yield f"a header of {extra}", signed_token(key, claims, header=text_of(json.dumps(fields | extra).encode()))
    yield "padding", f"{good}=="
    yield "a padded payload", f"{header}.{payload}=.{signature}"
    yield "one part more", f"{good}.{signature}"
    yield "bits that decoding drops", good[:-1] + chr(ord(good[-1]) + 1)
    raw = base64.urlsafe_b64decode(signature + "==")
    order = 2**252 + 27742317777372353535851937790883648493
    other = raw[:32] + (int.from_bytes(raw[32:], "little") + order).to_bytes(32, "little")
    yield "another signature of the same", f"{header}.{payload}.{text_of(other).decode()}"


def forgeries() -> Iterator[tuple[str, str]]:
    """Yields tokens made with what services other than the store hold: the attempt secret and public keys."""
    secret = attempt_secrets(SIGNING_KEY).encode()
    key = StoreKeys(SIGNING_KEY).signing()
    public = Ed25519PublicKey.from_public_bytes(key.public)
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    own = RoleKey(b"eve's own key")
    yield "an admin by the attempt secret", mac_token(secret, ADMIN)
    yield "a runner of one project by the attempt secret", mac_token(secret, ADMIN | {"role": "runner"})
    yield "the attempt secret under the header of a role", mac_token(secret, ADMIN, header=key.header)
    yield "the attempt secret as a signing key", TokenSigner(secret.decode()).issue(Role.ADMIN, subject="x", ttl_s=60)
    for name, bytes_ in (("raw", key.public), ("text", text_of(key.public)), ("PEM", pem)):
        yield f"the public key as the secret of a MAC ({name})", mac_token(bytes_, ADMIN)
        yield f"the same under the header of a role ({name})", mac_token(bytes_, ADMIN, header=key.header)
    yield "one's own key under the store's key id", signed_token(own, ADMIN, header=key.header)
    yield "one's own key under its own id", signed_token(own, ADMIN)
    for extra in ({"jwk": {"kty": "OKP", "crv": "Ed25519", "x": text_of(own.public).decode()}}, {"jku": "http://evil"}):
        header = json.dumps({"alg": "EdDSA", "typ": "JWT", **extra}).encode()
        yield f"one's own key in the header ({next(iter(extra))})", signed_token(own, ADMIN, header=text_of(header))
    yield from respelled(key)
    for algorithm in ("none", "None", "HS512", "EdDSA", ""):
        header = text_of(json.dumps({"alg": algorithm, "typ": "JWT"}).encode())
        yield f"algorithm {algorithm!r}, no signature", f"{header.decode()}.{mac_token(b'', ADMIN).split('.')[1]}."
        yield f"algorithm {algorithm!r}, the attempt secret", mac_token(secret, ADMIN, header=header)


@pytest.fixture
async def proxy(store: StoreHandle) -> AsyncIterator[RunningProxy]:
    async with running_proxy(store.target, signing_key=SIGNING_KEY, auth_failures_per_minute=0) as running:
        yield running


async def told_by_store(store: StoreHandle, token: str) -> FulmenError | None:
    stubs = await store.stubs(token=token)
    try:
        await stubs.rollouts.ListRollouts(pb.ListRolloutsRequest())
    except FulmenError as error:
        return error
    return None


async def status_of(proxy: RunningProxy, token: str) -> int:
    headers = {"authorization": f"Bearer {token}"}
    async with proxy.http.get(f"{proxy.url}/models", headers=headers) as answer:
        return answer.status


async def test_nothing_that_another_service_holds_makes_a_token_of_a_role(database_url: str) -> None:
    async with (
        running_store(database_url, auth_failures_per_minute=0) as store,
        running_proxy(store.target, signing_key=SIGNING_KEY, auth_failures_per_minute=0) as proxy,
    ):
        tokens = dict(forgeries())
        told = await asyncio.gather(*(told_by_store(store, token) for token in tokens.values()))
        statuses = await asyncio.gather(*(status_of(proxy, token) for token in tokens.values()))
        assert [what for what, error in zip(tokens, told, strict=True) if not isinstance(error, TokenInvalid)] == []
        assert [what for what, status in zip(tokens, statuses, strict=True) if status != 401] == []
        assert await told_by_store(store, store.token()) is None
        assert await status_of(proxy, store.token()) == 200


async def test_a_signature_makes_no_attempt_key(store: StoreHandle, proxy: RunningProxy) -> None:
    claims = ADMIN | {"role": "attempt", "sub": ATTEMPT, "epo": 1, "lse": "l", "mode": "train"}
    token = signed_token(StoreKeys(SIGNING_KEY).signing(), claims)
    assert isinstance(await told_by_store(store, token), TokenInvalid)
    assert await status_of(proxy, token) == 401


def test_the_proxys_secret_and_public_keys_tell_nothing_of_the_signing_key() -> None:
    secret = attempt_secrets(SIGNING_KEY)
    assert SIGNING_KEY not in secret
    assert StoreKeys(secret).published() != StoreKeys(SIGNING_KEY).published()


async def test_a_role_token_is_a_standard_jwt_that_the_published_key_verifies(store: StoreHandle) -> None:
    async with open_channel(store.target) as channel:  # The keys are public.
        published = await ProjectServiceStub(channel).ListSigningKeys(prj.ListSigningKeysRequest())
    [key] = published.keys
    token = store.token()
    jwk = {"kty": "OKP", "crv": "Ed25519", "x": text_of(key.public_key).decode(), "alg": "EdDSA"}
    claims = jwt.decode(token, jwt.PyJWK.from_dict(jwk).key, algorithms=["EdDSA"], issuer="fulmen")
    assert jwt.get_unverified_header(token) == {"alg": "EdDSA", "kid": key.key_id, "typ": "JWT"}
    assert claims["role"] == "admin"
    assert abs(published.server_time.seconds - time.time()) < 60


SECRET = attempt_secrets(SIGNING_KEY).encode()
ATTEMPT_CHANGES: list[dict[str, Any]] = [
    {"sub": "not/an/attempt"},
    {"sub": ""},
    {"epo": "one"},
    {"epo": -1},
    {"bud": 2**80},
    {"exp": 1e308},
    {"lse": 7},
]
MALFORMED: dict[str, dict[str, Any]] = {
    "no expiry": {"exp": None},
    "an expiry beyond all time": {"exp": 1e308},
    "an infinite expiry": {"exp": float("inf")},
    "an expiry that is no number": {"exp": "tomorrow"},
    "an expiry that is no time": {"exp": float("nan")},
    "a boolean expiry": {"exp": True},
    "a negative time of issue": {"iat": -1},
    "another issuer": {"iss": "somebody"},
    "a role that does not exist": {"role": "emperor"},
    "a role that is a list": {"role": ["admin"]},
    "a project that is a number": {"prj": 7},
    "an id that is an object": {"jti": {}},
}


def malformed() -> Iterator[tuple[str, str]]:
    """Yields tokens with a good signature and claims that cannot be read."""
    key = StoreKeys(SIGNING_KEY).signing()
    for what, change in MALFORMED.items():
        claims = {name: value for name, value in (ADMIN | change).items() if value is not None}
        yield what, signed_token(key, claims)
    for payload in (b"", b"[]", b"7", b"{", b"[" * 3000, b"\xff", b"null"):
        signed = key.header + b"." + text_of(payload)
        yield f"claims that are {payload[:9]!r}", (signed + b"." + text_of(key.sign(signed))).decode()
    for change in ATTEMPT_CHANGES:
        claims = {"role": "attempt", "sub": ATTEMPT, "epo": 1, "lse": "l", "mode": "train", "iss": "fulmen"}
        yield f"an attempt key with {change}", mac_token(SECRET, claims | {"exp": 2**33} | change)


async def test_malformed_claims_are_refused_as_such_and_not_counted_as_forged(database_url: str) -> None:
    async with (
        running_store(database_url, auth_failures_per_minute=ALLOWED) as store,
        running_proxy(store.target, signing_key=SIGNING_KEY, auth_failures_per_minute=ALLOWED) as proxy,
    ):
        runner = await store.stubs(role=Role.RUNNER)
        for what, token in malformed():
            refused = await told_by_store(store, token)
            assert isinstance(refused, TokenInvalid), what
            assert refused.metadata == {"problem": "malformed"}, what
            told = await runner.projects.IntrospectToken(prj.IntrospectTokenRequest(token=token))
            assert told == prj.IntrospectTokenResponse(problem="malformed"), what
            assert await status_of(proxy, token) == 401, what


async def test_a_clock_that_was_ahead_forges_nothing(database_url: str) -> None:
    key, now_s = StoreKeys(SIGNING_KEY).signing(), int(time.time())
    async with running_store(database_url, auth_failures_per_minute=ALLOWED) as store:
        for ahead_s in (1, 50, 3600):
            assert await told_by_store(store, signed_token(key, ADMIN | {"iat": now_s + ahead_s})) is None
        assert await told_by_store(store, signed_token(key, ADMIN | {"nbf": now_s + 50})) is None
        for _ in range(ALLOWED + 2):
            refused = await told_by_store(store, signed_token(key, ADMIN | {"nbf": now_s + 600}))
            assert refused is not None
            assert refused.metadata == {"problem": "early"}


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0], ids=["an hour ahead", "an hour behind"])
async def test_a_proxy_judges_keys_by_the_stores_clock(ahead_s: float) -> None:
    keys = KeyService(SIGNING_KEY)
    keys.ahead_s = ahead_s
    async with serving_keys(keys) as target, running_proxy(target, signing_key=SIGNING_KEY) as proxy:
        signer = TokenSigner(SIGNING_KEY, clock=lambda: time.time() + ahead_s)
        token = signer.issue(Role.CLIENT, subject="ann", ttl_s=600)
        # Before the first poll the keys are not known: that is not the caller's fault.
        while (status := await status_of(proxy, token)) == 503:
            pass
        assert status == 200


async def test_a_stores_own_clock_decides_nothing(
    store: StoreHandle, stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, short = time.time, TokenSigner(SIGNING_KEY).issue(Role.ADMIN, subject="ann", ttl_s=60)
    # Ahead, since the calls of this test have deadlines by the same clock.
    monkeypatch.setattr("time.time", lambda: real() + 3600.0)
    monkeypatch.setattr("time.time_ns", lambda: int((real() + 3600.0) * 1e9))
    assert await told_by_store(store, short) is None
    request = prj.IssueTokenRequest(project="projects/*", role=prj.TOKEN_ROLE_RUNNER, subject="r")
    request.ttl.FromSeconds(600)
    token = (await stubs.projects.IssueToken(request)).token
    claims = jwt.decode(token, options={"verify_signature": False})
    assert abs(claims["iat"] - real()) < 60
    published = await stubs.projects.ListSigningKeys(prj.ListSigningKeysRequest())
    assert abs(published.server_time.seconds - real()) < 60
    await create(stubs)
    (held,) = await (await Runner(stubs).open()).take(1)
    claims = jwt.decode(held.attempt_key, options={"verify_signature": False})
    assert abs(claims["iat"] - real()) < 60


async def test_a_new_signing_key_is_accepted_at_once_and_strangers_cause_no_flood_of_polls() -> None:
    new = "n" * 40
    keys = KeyService(SIGNING_KEY)
    async with (
        serving_keys(keys) as target,
        running_proxy(target, signing_key=SIGNING_KEY, auth_failures_per_minute=0) as proxy,
    ):
        assert await status_of(proxy, TokenSigner(SIGNING_KEY).issue(Role.CLIENT, subject="ann", ttl_s=60)) == 200
        polls = keys.polls
        stranger = TokenSigner("x" * 40).issue(Role.CLIENT, subject="eve", ttl_s=60)
        begun_s = time.monotonic()
        for _ in range(50):
            assert await status_of(proxy, stranger) == 401
        assert keys.polls - polls <= 3 + 2 * (time.monotonic() - begun_s)

        keys.keys = StoreKeys(f"{new}\n{SIGNING_KEY}")
        token = TokenSigner(new).issue(Role.CLIENT, subject="ann", ttl_s=60)
        while await status_of(proxy, token) != 200:
            pass
        keys.keys = StoreKeys(new)
        old = TokenSigner(SIGNING_KEY).issue(Role.CLIENT, subject="ann", ttl_s=60)
        while await status_of(proxy, old) != 401:
            pass


async def test_a_proxy_that_starts_while_the_store_is_away_knows_the_keys_that_it_knew(tmp_path: Path) -> None:
    settings = {"signing_key": SIGNING_KEY, "spool_dir": str(tmp_path / "spool")}
    token = TokenSigner(SIGNING_KEY).issue(Role.CLIENT, subject="ann", ttl_s=60)
    async with serving_keys(KeyService(SIGNING_KEY)) as target, running_proxy(target, **settings) as proxy:
        while await status_of(proxy, token) != 200:
            pass
    [kept] = (tmp_path / "spool").glob("*.keys")
    async with running_proxy("127.0.0.1:1", **settings) as proxy:
        assert await status_of(proxy, token) == 200
        assert await status_of(proxy, TokenSigner("x" * 40).issue(Role.CLIENT, subject="eve", ttl_s=60)) == 401
    kept.write_bytes(b"\xff not keys")
    async with running_proxy("127.0.0.1:1", **settings) as proxy:
        assert await status_of(proxy, token) == 503


async def test_two_authorizations_are_refused_alike_everywhere(
    store: StoreHandle, proxy: RunningProxy, stubs: Stubs
) -> None:
    good, bad = store.token(), "forged"
    for first, second in ((good, bad), (bad, good), (good, good)):
        pair = [("authorization", f"Bearer {each}") for each in (first, second)]
        for target, call in ((store.target, _list), (f"127.0.0.1:{proxy.parts.server.port}", _backends)):
            async with open_channel(target) as channel:
                with pytest.raises(TokenInvalid, match="several authorization headers"):
                    await call(channel, tuple(pair))
        otlp = f"http://127.0.0.1:{store.parts.ports['http_port']}/v1/traces"
        async with aiohttp.ClientSession() as session:
            async with session.post(
                otlp, data=b"", headers=[*pair, ("content-type", "application/x-protobuf")]
            ) as told:
                assert told.status == 401
            async with session.get(f"{proxy.url}/models", headers=pair) as told:
                assert told.status == 401
            keys = [("x-api-key", first), ("x-api-key", second)]
            async with session.get(f"{proxy.url}/models", headers=keys) as told:
                assert told.status == 401


async def _list(channel: Any, metadata: Any) -> None:
    await ProjectServiceStub(channel).ListProjects(prj.ListProjectsRequest(), metadata=metadata)


async def _backends(channel: Any, metadata: Any) -> None:
    from fulmen.llm_proxy.v1 import backend_service_pb2
    from fulmen.llm_proxy.v1.backend_service_pb2_grpc import BackendServiceStub

    await BackendServiceStub(channel).ListBackends(backend_service_pb2.ListBackendsRequest(), metadata=metadata)
