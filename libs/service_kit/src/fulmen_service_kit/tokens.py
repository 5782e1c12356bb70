"""Tokens: signed statements of who calls. The signing keys are the deployment's; JWT (RFC 7519) with HS256.

An attempt key is a token too: it names one attempt and its lease, and is all that an agent ever holds.

Every token is bound to one project, or to all of them (`projects/*`); no role reaches further than its token.
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

# What is wrong with a token: `metadata["problem"]` of TokenInvalid.
MISSING, FORGED, EXPIRED, REVOKED = "missing", "forged", "expired", "revoked"


class Role(StrEnum):
    """What a caller is."""

    ADMIN = "admin"
    SERVICE = "service"  # the proxy, the algorithm service
    RUNNER = "runner"
    CLIENT = "client"  # people and tools
    READER = "reader"  # people and tools that only look
    ATTEMPT = "attempt"  # an agent, bound to one attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls, as the token says."""

    role: Role
    subject: str = ""
    project: str = DEFAULT_PROJECT  # `projects/{project}`, or `projects/*`
    token_id: str = ""  # empty for attempt keys, which end with their lease
    expires_s: float = math.inf  # Unix time after which the token is no longer good
    # Of an attempt key only:
    attempt: AttemptName | None = None
    epoch: int = 0
    lease_id: str = ""
    mode: str = ""  # train, validation or test
    token_budget: int = 0  # tokens of its model calls; 0: what the project says

    @property
    def own_project(self) -> str:
        """The project that is meant when a request names none: the token's, or the default one."""
        return DEFAULT_PROJECT if self.project == ALL_PROJECTS else self.project

    def may_access(self, project: str) -> bool:
        """Tells whether the caller may see a project: the token's own, or any with a token for all projects."""
        return self.project in (ALL_PROJECTS, project)


def usual_project(role: Role) -> str:
    """Returns what a token of a role is bound to unless somebody decides: services serve all projects, people one."""
    return DEFAULT_PROJECT if role in (Role.CLIENT, Role.READER) else ALL_PROJECTS


def new_token_id() -> str:
    """Mints the id of a token: 22 characters of base64url, no secret."""
    return secrets.token_urlsafe(_TOKEN_ID_BYTES)


class TokenSigner:
    """Makes tokens."""

    def __init__(self, signing_keys: SigningKeys | str) -> None:
        """Takes the deployment's keys."""
        self._keys = SigningKeys(signing_keys) if isinstance(signing_keys, str) else signing_keys

    def issue(self, role: Role, *, subject: str, ttl_s: float, project: str | None = None, token_id: str = "") -> str:
        """Makes a token of a role other than ATTEMPT.

        Args:
            role: What it may do.
            subject: Who it is for; shows up in logs.
            ttl_s: How long it is valid, in seconds.
            project: What it is bound to; None: `usual_project(role)`.
            token_id: Its id, by which it can be revoked; empty: a new one.
        """
        if role is Role.ATTEMPT:
            raise ValueError("an attempt key is made by attempt_key()")
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
        """Makes the key of one attempt, valid for `ttl_s` seconds.

        Args:
            attempt: Whose key it is.
            project: The attempt's project.
            lease_id: The lease that it runs under.
            epoch: The fencing epoch of that lease.
            mode: "train", "validation" or "test".
            ttl_s: How long it is valid, in seconds.
            token_budget: How many tokens its model calls may use; 0: what the project says.
        """
        now = int(time.time())
        budget = f',"bud":{token_budget}' if token_budget else ""
        # Written out, as below: with an encoder it takes twice as long.
        return self._signed(
            f'{{"role":"{Role.ATTEMPT.value}","sub":{_quoted(str(attempt))},"prj":{_quoted(project)},"epo":{epoch}'
            f',"lse":{_quoted(lease_id)},"mode":{_quoted(mode)}{budget},"iss":"{_ISSUER}","iat":{now},"exp":{now + int(ttl_s)}}}'
        )

    def _sign(self, claims: dict[str, object], ttl_s: float) -> str:
        # Written out (RFC 7515, 3.1): the store signs a key for every attempt, and the library takes ten times as long.
        now = int(time.time())
        return self._signed(_to_json(claims | {"iss": _ISSUER, "iat": now, "exp": now + int(ttl_s)}))

    def _signed(self, payload: str) -> str:
        signed = _HEADER + b"." + _base64url(payload.encode())
        return (signed + b"." + _base64url(hmac.digest(self._keys.signing(), signed, "sha256"))).decode()


class OwnToken:
    """A token that a service makes for itself, and makes anew long before it ends, or when the keys have changed."""

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
        """Takes what `TokenSigner.issue` does."""
        self._signing_keys = signing_keys
        self._signer = TokenSigner(signing_keys)
        self._role, self._subject, self._project, self._ttl_s = role, subject, project, ttl_s
        self._clock = clock
        self._token, self._renew_at_s, self._key = "", -math.inf, b""

    def __call__(self) -> str:
        """Returns the token; empty if there is no key."""
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
    """Checks tokens. Tokens that were good are remembered until they expire, since an agent calls many times."""

    def __init__(self, signing_keys: SigningKeys | str, *, revoked: Container[str] = frozenset()) -> None:
        """Takes the deployment's keys and the ids of revoked tokens; both may change at any time."""
        self._keys = SigningKeys(signing_keys) if isinstance(signing_keys, str) else signing_keys
        self._known_by = self._keys.accepted()
        self._revoked = revoked
        self._known: OrderedDict[str, tuple[float, Caller]] = OrderedDict()

    def verify(self, token: str) -> Caller:
        """Returns who the token is of.

        Raises:
            TokenInvalid: If it is missing, malformed, expired, revoked or signed with another key; the text and
                `metadata["problem"]` (missing, forged, expired or revoked) say which.
        """
        keys = self._keys.accepted()
        if keys is not self._known_by:
            # What a key that was taken away has signed is good no more.
            self._known.clear()
            self._known_by = keys
        known = self._known.get(token)
        caller = known[1] if known is not None and known[0] > time.time() else self._read(token)
        self.check(caller)
        return caller

    async def prepare(self, token: str) -> None:
        """Needs nothing: the keys are here."""

    def check(self, caller: Caller) -> None:
        """Checks that the token of a caller was not revoked since it was verified.

        Raises:
            TokenInvalid: If it was.
        """
        if caller.token_id and caller.token_id in self._revoked:
            raise TokenInvalid("The token was revoked.", problem=REVOKED)

    def _read(self, token: str) -> Caller:
        if not token:
            raise TokenInvalid("A token is needed: send `authorization: Bearer <token>`.", problem=MISSING)
        # First of all: what somebody else made is not even parsed, and refusing it costs a tenth.
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
    return Caller(
        role=role,
        subject=subject,
        project=project,
        expires_s=expires_s,
        attempt=parse_attempt_name(subject),
        epoch=int(str(claims.get("epo", 0))),
        lease_id=str(claims.get("lse", "")),
        mode=str(claims.get("mode", "")),
        token_budget=int(str(claims.get("bud", 0))),
    )
