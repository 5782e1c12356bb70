"""Tokens: JWTs (RFC 7519) of two kinds.

Tokens of roles are signed by the store with Ed25519 (EdDSA, RFC 8037) and verified with its public keys. Attempt keys, the
only credential of an agent, are made and verified a hundred times as often, so they are authenticated with a MAC (HS256)
whose secret only the store and the proxy hold. Invariant: a MAC makes a token of role ATTEMPT and no other, a signature
any role but ATTEMPT. Every token is bound to one project or to all (`projects/*`).
"""

import base64
import binascii
import hmac
import json
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from fulmen.errors import ArgumentInvalid, TokenInvalid, Unavailable
from fulmen.ids import ALL_PROJECTS, DEFAULT_PROJECT, AttemptName, parse_attempt_name, parse_training_run_name
from fulmen_service_kit.security.asked_attempts import AskedAttempts, Runs
from fulmen_service_kit.security.call_terms import NO_TERMS, CallTerms
from fulmen_service_kit.security.keys import ATTEMPT_HEADER, Keys, StoreKeys
from fulmen_service_kit.security.secret import SigningKeys

LEEWAY_S: Final = 60.0
"""Time by which a token may be valid in the future only (`nbf`). Expiry has none: it would lengthen every token."""

_ISSUER = "fulmen"
_CACHE_SIZE = 8192
_TOKEN_ID_BYTES = 16
# The end of the year 9999, the last that a timestamp can hold.
_MAX_TIME_S: Final = 253_402_300_799

# Problems of a token: `metadata["problem"]` of TokenInvalid.
MISSING, FORGED, EXPIRED, REVOKED = "missing", "forged", "expired", "revoked"
MALFORMED, EARLY = "malformed", "early"


class Role(StrEnum):
    """Role of a caller."""

    ADMIN = "admin"
    SERVICE = "service"  # the proxy, the algorithm service
    RUNNER = "runner"
    ENGINE = "engine"  # an engine on another machine, bound to one training run
    RANK = "rank"  # a machine that takes ranks of one training run, bound to that
    CLIENT = "client"  # people and tools
    READER = "reader"  # people and tools with read access only
    ATTEMPT = "attempt"  # an agent, bound to one attempt


RUN_ROLES = frozenset({Role.ENGINE, Role.RANK})
"""Roles of machines that belong to one training run: each of their tokens names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """A caller, as identified by its token."""

    role: Role
    subject: str = ""
    project: str = DEFAULT_PROJECT  # `projects/{project}`, or `projects/*`
    token_id: str = ""  # empty for attempt keys, which end with their lease
    expires_s: float = math.inf  # Unix time at which the token expires
    issued_s: float = 0.0  # Unix time at which the token was issued
    signed_by: bytes = b""  # header of the key that signed the token; empty for attempt keys
    training_run: str = ""  # of `RUN_ROLES`: the run that it belongs to
    # Set for attempt keys only:
    attempt: AttemptName | None = None
    epoch: int = 0
    lease_id: str = ""
    mode: str = ""  # train, validation or test
    terms: CallTerms = NO_TERMS

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
    """Issues tokens and attempt keys; the store's alone, in production."""

    def __init__(self, keys: StoreKeys | SigningKeys | str, *, clock: Callable[[], float] = time.time) -> None:
        """Initializes the signer.

        Args:
            keys: Keys to sign with.
            clock: The store's time, Unix seconds; by default this machine's.
        """
        self.keys = keys if isinstance(keys, StoreKeys) else StoreKeys(keys)
        self.clock = clock

    def issue(
        self,
        role: Role,
        *,
        subject: str,
        ttl_s: float,
        project: str | None = None,
        token_id: str = "",
        training_run: str = "",
    ) -> str:
        """Issues a token of a role other than ATTEMPT.

        Args:
            role: Role of the caller.
            subject: Name of the caller, for logs.
            ttl_s: Validity, in seconds.
            project: Project that it is bound to; None for `usual_project(role)`.
            token_id: Id for revocation; empty for a new one.
            training_run: Of `RUN_ROLES`: `projects/{project}/trainingRuns/{id}`, the run that the machine belongs to.
        """
        if role is Role.ATTEMPT:
            raise ValueError("use attempt_key() for role attempt")
        if (role in RUN_ROLES) != bool(training_run):
            raise ValueError("tokens of role engine or rank name a training run; other tokens must not")
        now = int(self.clock())
        claims = {
            "role": role.value,
            "sub": subject,
            "prj": usual_project(role) if project is None else project,
            "jti": token_id or new_token_id(),
            "iss": _ISSUER,
            "iat": now,
            "exp": now + int(ttl_s),
        }
        if training_run:
            claims["run"] = training_run
        key = self.keys.signing()
        signed = key.header + b"." + _base64url(_to_json(claims).encode())
        return (signed + b"." + _base64url(key.sign(signed))).decode()

    def attempt_key(
        self,
        attempt: AttemptName | str,
        *,
        project: str,
        lease_id: str,
        epoch: int,
        mode: str,
        ttl_s: float,
        terms: CallTerms = NO_TERMS,
    ) -> str:
        """Issues the key of an attempt.

        Args:
            attempt: Name of the attempt.
            project: Project of the attempt.
            lease_id: Lease of the attempt.
            epoch: Fencing epoch of the lease.
            mode: "train", "validation" or "test".
            ttl_s: Validity, in seconds.
            terms: What limits its model calls.
        """
        now = int(self.clock())
        # Formatted by hand: an encoder takes twice as long.
        payload = (
            f'{{"role":"{Role.ATTEMPT.value}","sub":{_quoted(str(attempt))},"prj":{_quoted(project)},"epo":{epoch}'
            f',"lse":{_quoted(lease_id)},"mode":{_quoted(mode)}{terms.claims()},"iss":"{_ISSUER}","iat":{now},"exp":{now + int(ttl_s)}}}'
        )
        signed = ATTEMPT_HEADER + b"." + _base64url(payload.encode())
        return (signed + b"." + _mac(self.keys.current().attempts[0], signed)).decode()


class TokenVerifier:
    """Verifies tokens. Valid tokens are cached until they expire, so a signature is verified once."""

    def __init__(
        self,
        keys: Keys | SigningKeys | str,
        *,
        revoked: Container[str] = frozenset(),
        clock: Callable[[], float] = time.time,
        look_up: Callable[[], Awaitable[None]] | None = None,
        runs: Runs | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initializes the verifier.

        Args:
            keys: Keys to verify with, which may change at any time.
            revoked: Ids of revoked tokens, which may change at any time.
            clock: The store's time, Unix seconds; by default this machine's.
            look_up: Asks the store for its keys now, for a token of an unknown key; by default nothing.
            runs: Asks the store whether the attempt of a key that looks expired has not ended, and raises FulmenError if
                that is unknown; by default such keys are refused.
            monotonic: Seconds that only grow.
        """
        self._keys: Keys = StoreKeys(keys) if isinstance(keys, str | SigningKeys) else keys
        self._known_by = self._keys.current()
        self._revoked = revoked
        self._clock = clock
        self._look_up = look_up
        self._asked = None if runs is None else AskedAttempts(runs, clock=monotonic)
        self._known: OrderedDict[str, tuple[float, Caller]] = OrderedDict()

    def verify(self, token: str) -> Caller:
        """Returns the token's caller.

        Raises:
            TokenInvalid: If it is missing, forged, malformed, expired or revoked; see `metadata["problem"]`.
            Unavailable: If it may be valid, but the store's keys have not been read yet.
        """
        keys = self._keys.current()
        if keys is not self._known_by:
            # Tokens of a removed key are no longer valid.
            self._known.clear()
            if self._asked is not None:
                self._asked.forget()
            self._known_by = keys
        known = self._known.get(token)
        caller = known[1] if known is not None and known[0] > self._clock() else self._read(token)
        self._require_unrevoked(caller)
        return caller

    async def prepare(self, token: str) -> None:
        """Asks the store what this process does not know: the token's key, or whether its attempt still runs.

        Raises:
            Unavailable: If the key of an attempt looks expired and the store does not answer.
        """
        known = self._known.get(token)
        if not token or (known is not None and known[0] > self._clock()):
            return
        header = token.encode(errors="replace").partition(b".")[0]
        if header == ATTEMPT_HEADER:
            if self._asked is not None and not self._asked.knows(token):
                await self._doubt(token, self._asked)
        elif self._look_up is not None and header not in self._keys.current().roles:
            await self._look_up()

    async def _doubt(self, token: str, asked: AskedAttempts) -> None:
        """Asks the store about the attempt of a key, if nothing but its expiry is against it."""
        asked.forget(token)  # too old by now
        try:
            self.verify(token)
        except TokenInvalid as error:
            if error.metadata.get("problem") == EXPIRED:
                await asked.ask(token, self._authentic(token)[0], now_s=self._clock())

    def check(self, caller: Caller) -> None:
        """Checks that the caller's token, with which a stream was opened, is still valid.

        Raises:
            TokenInvalid: If it was revoked.
            Unavailable: If it has expired or its key was removed. A service that has refreshed its token since opens the
                stream again; anyone else is refused then.
        """
        self._require_unrevoked(caller)
        is_of_known_key = not caller.signed_by or caller.signed_by in self._keys.current().roles
        if caller.expires_s <= self._clock() or not is_of_known_key:
            raise Unavailable("The token that opened this stream is no longer valid: open the stream again.")

    def _require_unrevoked(self, caller: Caller) -> None:
        if caller.token_id and caller.token_id in self._revoked:
            raise TokenInvalid("The token was revoked.", problem=REVOKED)

    def _read(self, token: str) -> Caller:
        caller, early_s = self._authentic(token)
        now_s = self._clock()
        if caller.expires_s <= now_s:
            running = None if self._asked is None else self._asked.caller(token)
            if running is None:
                raise TokenInvalid("The token has expired.", problem=EXPIRED)
            return running
        if early_s - now_s > LEEWAY_S:
            raise TokenInvalid(f"The token is valid only in {early_s - now_s:.0f} s.", problem=EARLY)
        self._known.pop(token, None)
        self._known[token] = (caller.expires_s, caller)
        if len(self._known) > _CACHE_SIZE:
            self._known.popitem(last=False)
        return caller

    def _authentic(self, token: str) -> tuple[Caller, float]:
        """Returns the caller of a token of this deployment, whatever the time, and when the token begins to be valid."""
        if not token:
            raise TokenInvalid("A token is required: send `authorization: Bearer <token>`.", problem=MISSING)
        signed, _, signature = token.encode(errors="replace").rpartition(b".")
        header, _, payload = signed.partition(b".")
        # The signature first: forged tokens are not parsed.
        is_attempt = header == ATTEMPT_HEADER
        if is_attempt:
            if not any(hmac.compare_digest(signature, _mac(key, signed)) for key in self._known_by.attempts):
                raise _forged()
        else:
            self._check_signature(header, signed, signature)
        claims = _claims(payload)
        caller = _caller(claims, signed_by=b"" if is_attempt else header)
        return caller, 0.0 if is_attempt else _moment(claims, "nbf", 0.0)

    def _check_signature(self, header: bytes, signed: bytes, signature: bytes) -> None:
        key = self._known_by.roles.get(header)
        if key is None:
            if self._keys.is_known:
                raise _forged()
            raise Unavailable("The keys that verify tokens have not been read from the store yet; retry.")
        try:
            is_authentic = key.verifies(_from_base64url(signature), signed)
        except ValueError:
            is_authentic = False
        if not is_authentic:
            raise _forged()


def _mac(key: bytes, signed: bytes) -> bytes:
    return _base64url(hmac.digest(key, signed, "sha256"))


def _forged() -> TokenInvalid:
    return TokenInvalid("The token is malformed or was not issued by this deployment.", problem=FORGED)


def _malformed(what: str) -> TokenInvalid:
    return TokenInvalid(f"The token is malformed: {what}.", problem=MALFORMED)


def _base64url(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _from_base64url(text: bytes) -> bytes:
    """Decodes base64url without padding; raises ValueError for any other spelling of the same bytes."""
    data = base64.urlsafe_b64decode(text + b"=" * (-len(text) % 4))
    if _base64url(data) != text:
        raise ValueError("not base64url")
    return data


_quoted = json.encoder.encode_basestring_ascii
_to_json = json.JSONEncoder(separators=(",", ":")).encode


def _claims(payload: bytes) -> dict[str, Any]:
    try:
        claims = json.loads(_from_base64url(payload))
    except (ValueError, RecursionError, binascii.Error):
        claims = None
    if not isinstance(claims, dict):
        raise _malformed("its claims are not a JSON object")
    return claims


def _caller(claims: dict[str, Any], *, signed_by: bytes) -> Caller:
    is_attempt = not signed_by
    if _text(claims, "iss") != _ISSUER:
        raise _malformed("its issuer is wrong")
    expires_s, issued_s = _moment(claims, "exp", math.inf), _moment(claims, "iat", 0.0)
    if not math.isfinite(expires_s):
        raise _malformed("it has no expiry time")
    try:
        role = Role(_text(claims, "role"))
    except ValueError:
        raise TokenInvalid("The token has a role that this version does not know.", problem=MALFORMED) from None
    if (role is Role.ATTEMPT) != is_attempt:
        # Only the holder of the other kind's key can make this.
        raise _forged()
    subject = _text(claims, "sub")
    if not is_attempt:
        return Caller(
            role=role,
            subject=subject,
            project=_text(claims, "prj", DEFAULT_PROJECT),
            token_id=_text(claims, "jti"),
            expires_s=expires_s,
            issued_s=issued_s,
            signed_by=signed_by,
            training_run=_training_run(claims) if role in RUN_ROLES else "",
        )
    try:
        attempt = parse_attempt_name(subject)
    except ArgumentInvalid:
        raise _malformed("it does not name an attempt") from None
    return Caller(
        role=role,
        subject=subject,
        project=attempt.project,
        expires_s=expires_s,
        issued_s=issued_s,
        attempt=attempt,
        epoch=_count(claims, "epo"),
        lease_id=_text(claims, "lse"),
        mode=_text(claims, "mode"),
        terms=CallTerms(
            token_budget=_count(claims, "bud"),
            training_run=_text(claims, "run"),
            agent=_text(claims, "agt"),
            continues=_count(claims, "cnt"),
        ),
    )


def _training_run(claims: dict[str, Any]) -> str:
    name = _text(claims, "run")
    try:
        project = parse_training_run_name(name).project
    except ArgumentInvalid:
        raise _malformed("it does not name a training run") from None
    if project != _text(claims, "prj"):
        raise _malformed("its training run belongs to another project")
    return name


def _text(claims: dict[str, Any], name: str, default: str = "") -> str:
    value = claims.get(name, default)
    if not isinstance(value, str):
        raise _malformed(f"its claim {name} is not a text")
    return value


def _count(claims: dict[str, Any], name: str) -> int:
    value = claims.get(name, 0)
    if type(value) is not int or not 0 <= value < 2**63:
        raise _malformed(f"its claim {name} is not a count")
    return value


def _moment(claims: dict[str, Any], name: str, default: float) -> float:
    value = claims.get(name, default)
    # Also false for NaN.
    if name in claims and (type(value) not in (int, float) or not 0 <= value <= _MAX_TIME_S):
        raise _malformed(f"its claim {name} is not a time")
    return float(value)
