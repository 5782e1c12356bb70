"""Tokens: JWTs (RFC 7519) with HS256, signed with the deployment's keys.

An attempt key is a token for one attempt and its lease, and the only credential of an agent. Every token is bound to one
project or to all (`projects/*`), whatever its role.
"""

import base64
import hmac
import json
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Container
from dataclasses import dataclass
from enum import StrEnum

import jwt

from fulmen.errors import TokenInvalid
from fulmen.ids import ALL_PROJECTS, DEFAULT_PROJECT, AttemptName, parse_attempt_name
from fulmen_service_kit.secret import SigningKeys

_ISSUER = "fulmen"
_ALGORITHM = "HS256"
_CACHE_SIZE = 8192
_TOKEN_ID_BYTES = 16

# Problems of a token: `metadata["problem"]` of TokenInvalid.
MISSING, FORGED, EXPIRED, REVOKED = "missing", "forged", "expired", "revoked"


class Role(StrEnum):
    """Role of a caller."""

    ADMIN = "admin"
    SERVICE = "service"  # the proxy, the algorithm service
    RUNNER = "runner"
    CLIENT = "client"  # people and tools
    READER = "reader"  # people and tools with read access only
    ATTEMPT = "attempt"  # an agent, bound to one attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A caller, as identified by its token."""

    role: Role
    subject: str = ""
    project: str = DEFAULT_PROJECT  # `projects/{project}`, or `projects/*`
    token_id: str = ""  # empty for attempt keys, which end with their lease
    expires_s: float = math.inf  # Unix time at which the token expires
    # Set for attempt keys only:
    attempt: AttemptName | None = None
    epoch: int = 0
    lease_id: str = ""
    mode: str = ""  # train, validation or test
    token_budget: int = 0  # maximum tokens of its model calls; 0 for the project's limit

    @property
    def own_project(self) -> str:
        """Project of a request that names none: the token's, or the default one."""
        return DEFAULT_PROJECT if self.project == ALL_PROJECTS else self.project

    def may_access(self, project: str) -> bool:
        """Returns True if the token is bound to the project or to all projects."""
        return self.project in (ALL_PROJECTS, project)


def usual_project(role: Role) -> str:
    """Returns the default project of a role's tokens: all for services, the default one for people."""
    return DEFAULT_PROJECT if role in (Role.CLIENT, Role.READER) else ALL_PROJECTS


def new_token_id() -> str:
    """Returns a new token id: 22 characters of base64url. Not a secret."""
    return secrets.token_urlsafe(_TOKEN_ID_BYTES)


class TokenSigner:
    """Issues tokens."""

    def __init__(self, signing_keys: SigningKeys | str) -> None:
        self._keys = SigningKeys(signing_keys) if isinstance(signing_keys, str) else signing_keys

    def issue(self, role: Role, *, subject: str, ttl_s: float, project: str | None = None, token_id: str = "") -> str:
        """Issues a token of a role other than ATTEMPT.

        Args:
            role: Role of the caller.
            subject: Name of the caller, for logs.
            ttl_s: Validity, in seconds.
            project: Project that it is bound to; None for `usual_project(role)`.
            token_id: Id for revocation; empty for a new one.
        """
        if role is Role.ATTEMPT:
            raise ValueError("use attempt_key() for role attempt")
        claims: dict[str, object] = {
            "role": role.value,
            "sub": subject,
            "prj": usual_project(role) if project is None else project,
        }
        return self._sign(claims | {"jti": token_id or new_token_id()}, ttl_s)

    def attempt_key(
        self,
        attempt: AttemptName | str,
        *,
        project: str,
        lease_id: str,
        epoch: int,
        mode: str,
        ttl_s: float,
        token_budget: int = 0,
    ) -> str:
        """Issues the key of an attempt.

        Args:
            attempt: Name of the attempt.
            project: Project of the attempt.
            lease_id: Lease of the attempt.
            epoch: Fencing epoch of the lease.
            mode: "train", "validation" or "test".
            ttl_s: Validity, in seconds.
            token_budget: Maximum tokens of its model calls; 0 for the project's limit.
        """
        now = int(time.time())
        budget = f',"bud":{token_budget}' if token_budget else ""
        # Formatted by hand: an encoder takes twice as long.
        return self._signed(
            f'{{"role":"{Role.ATTEMPT.value}","sub":{_quoted(str(attempt))},"prj":{_quoted(project)},"epo":{epoch}'
            f',"lse":{_quoted(lease_id)},"mode":{_quoted(mode)}{budget},"iss":"{_ISSUER}","iat":{now},"exp":{now + int(ttl_s)}}}'
        )

    def _sign(self, claims: dict[str, object], ttl_s: float) -> str:
        # Implemented here (RFC 7515, 3.1): the store signs a key per attempt, and the library is ten times slower.
        now = int(time.time())
        return self._signed(_to_json(claims | {"iss": _ISSUER, "iat": now, "exp": now + int(ttl_s)}))

    def _signed(self, payload: str) -> str:
        signed = _HEADER + b"." + _base64url(payload.encode())
        return (signed + b"." + _base64url(hmac.digest(self._keys.signing(), signed, "sha256"))).decode()


class OwnToken:
    """A token that a service issues to itself, renewed at half of its validity and when the keys change."""

    def __init__(
        self,
        signing_keys: SigningKeys,
        role: Role,
        *,
        subject: str,
        project: str | None = None,
        ttl_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initializes the token; see `TokenSigner.issue` for the arguments."""
        self._signing_keys = signing_keys
        self._signer = TokenSigner(signing_keys)
        self._role, self._subject, self._project, self._ttl_s = role, subject, project, ttl_s
        self._clock = clock
        self._token, self._renew_at_s, self._key = "", -math.inf, b""

    def __call__(self) -> str:
        """Returns the token; empty without a key."""
        if not self._signing_keys:
            return ""
        key = self._signing_keys.signing()
        if self._clock() >= self._renew_at_s or key is not self._key:
            self._token = self._signer.issue(
                self._role, subject=self._subject, ttl_s=self._ttl_s, project=self._project
            )
            self._key, self._renew_at_s = key, self._clock() + self._ttl_s / 2
        return self._token


class TokenVerifier:
    """Verifies tokens with the deployment's keys. Valid tokens are cached until they expire."""

    def __init__(self, signing_keys: SigningKeys | str, *, revoked: Container[str] = frozenset()) -> None:
        """Initializes the verifier; keys and revoked token ids may change at any time."""
        self._keys = SigningKeys(signing_keys) if isinstance(signing_keys, str) else signing_keys
        self._known_by = self._keys.accepted()
        self._revoked = revoked
        self._known: OrderedDict[str, tuple[float, Caller]] = OrderedDict()

    def verify(self, token: str) -> Caller:
        """Returns the token's caller.

        Raises:
            TokenInvalid: If it is missing, forged, expired or revoked; see `metadata["problem"]`.
        """
        keys = self._keys.accepted()
        if keys is not self._known_by:
            # Tokens of a removed key are no longer valid.
            self._known.clear()
            self._known_by = keys
        known = self._known.get(token)
        caller = known[1] if known is not None and known[0] > time.time() else self._read(token)
        self.check(caller)
        return caller

    async def prepare(self, token: str) -> None:
        """Does nothing: the keys are local."""

    def check(self, caller: Caller) -> None:
        """Checks that the caller's token was not revoked since it was verified.

        Raises:
            TokenInvalid: If it was.
        """
        if caller.token_id and caller.token_id in self._revoked:
            raise TokenInvalid("The token was revoked.", problem=REVOKED)

    def _read(self, token: str) -> Caller:
        if not token:
            raise TokenInvalid("A token is needed: send `authorization: Bearer <token>`.", problem=MISSING)
        # Signature first: forged tokens are not parsed, which makes rejecting them ten times cheaper.
        signed, _, signature = token.encode(errors="replace").rpartition(b".")
        key = next((key for key in self._known_by if _is_by(key, signed, signature)), None)
        if key is None:
            raise _forged()
        try:
            claims = jwt.decode(
                token, key, algorithms=[_ALGORITHM], issuer=_ISSUER, options={"require": ["exp", "role"]}
            )
        except jwt.ExpiredSignatureError:
            raise TokenInvalid("The token has expired.", problem=EXPIRED) from None
        except jwt.InvalidTokenError:
            raise _forged() from None
        caller = _caller(claims)
        self._known.pop(token, None)
        self._known[token] = (caller.expires_s, caller)
        if len(self._known) > _CACHE_SIZE:
            self._known.popitem(last=False)
        return caller


def _is_by(key: bytes, signed: bytes, signature: bytes) -> bool:
    return hmac.compare_digest(signature, _base64url(hmac.digest(key, signed, "sha256")))


def _forged() -> TokenInvalid:
    return TokenInvalid("The token is malformed or was not made by this deployment.", problem=FORGED)


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


_quoted = json.encoder.encode_basestring_ascii
_to_json = json.JSONEncoder(separators=(",", ":")).encode
_HEADER = _base64url(b'{"alg":"HS256","typ":"JWT"}')


def _caller(claims: dict[str, object]) -> Caller:
    try:
        role = Role(str(claims["role"]))
    except ValueError:
        raise TokenInvalid("The token has a role that this version does not know.") from None
    subject, project = str(claims.get("sub", "")), str(claims.get("prj", DEFAULT_PROJECT))
    expires_s = float(str(claims["exp"]))
    if role is not Role.ATTEMPT:
        token_id = str(claims.get("jti", ""))
        return Caller(role=role, subject=subject, project=project, token_id=token_id, expires_s=expires_s)
    attempt = parse_attempt_name(subject)
    return Caller(
        role=role,
        subject=subject,
        project=attempt.project,
        expires_s=expires_s,
        attempt=attempt,
        epoch=int(str(claims.get("epo", 0))),
        lease_id=str(claims.get("lse", "")),
        mode=str(claims.get("mode", "")),
        token_budget=int(str(claims.get("bud", 0))),
    )
