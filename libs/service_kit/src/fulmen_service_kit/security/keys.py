"""The keys of a deployment, all derived from the store's setting `signing_key`.

Each line of the setting gives two keys that share nothing but their origin: an Ed25519 key (RFC 8032), which signs the
tokens of roles, and the secret of attempt keys, a MAC. The store holds the lines; the proxy holds the secrets of attempt
keys, from which no other key can be derived; every other service holds public keys alone.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from fulmen_service_kit.security.secret import SigningKeys, split_keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

ATTEMPT_HEADER: Final = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').rstrip(b"=")
"""The header of every attempt key, encoded."""

PUBLIC_KEY_BYTES: Final = 32
PUBLIC_KEYS_FILE: Final = "public.keys"
_log = structlog.get_logger()
_ROLE_LABEL: Final = b"fulmen role tokens"
_ATTEMPT_LABEL: Final = b"fulmen attempt keys"


class PublicKey:
    """A public key of role tokens."""

    def __init__(self, raw: bytes) -> None:
        """Keeps the key, `PUBLIC_KEY_BYTES` long."""
        self._raw = raw

    @cached_property
    def _public(self) -> Ed25519PublicKey:
        # 7 MB per process, and nothing before the first token of a role: a proxy's workers may see attempt keys alone.
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        return Ed25519PublicKey.from_public_bytes(self._raw)

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Returns whether a signature of a message was made with the private key."""
        from cryptography.exceptions import InvalidSignature  # as above

        try:
            self._public.verify(signature, message)
        except InvalidSignature:
            return False
        return True


class KeySet:
    """Keys that tokens are verified with."""

    def __init__(self, public_keys: Callable[[], Iterable[bytes]], attempts: tuple[bytes, ...]) -> None:
        """Keeps the keys.

        Args:
            public_keys: Returns the public keys of role tokens; called when they are first needed.
            attempts: Secrets of attempt keys; empty where attempt keys are not accepted.
        """
        self._public_keys = public_keys
        self.attempts = attempts

    @cached_property
    def roles(self) -> Mapping[bytes, PublicKey]:
        """Public keys of role tokens by the encoded header of the tokens that they sign.

        A token's header is compared, not parsed, so that no token can choose its algorithm or key.
        """
        return {token_header(key): PublicKey(key) for key in self._public_keys()}


class Keys(Protocol):
    """A source of keys that may change at any time."""

    @property
    def is_known(self) -> bool:
        """True if the keys of role tokens are known yet."""
        ...

    def current(self) -> KeySet:
        """Returns the keys; a new object after a change."""
        ...


class RoleKey:
    """A private key of role tokens."""

    def __init__(self, line: bytes) -> None:
        self._seed = hmac.digest(line, _ROLE_LABEL, "sha256")

    @cached_property
    def _private(self) -> Ed25519PrivateKey:
        # As in `PublicKey`: a store in dev mode may never need it.
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self._seed)

    @cached_property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._private.public_key().public_bytes_raw()

    @cached_property
    def header(self) -> bytes:
        """The encoded header of the tokens that this key signs."""
        return token_header(self.public)

    def sign(self, message: bytes) -> bytes:
        """Returns the signature of a message."""
        return self._private.sign(message)


class StoreKeys:
    """The keys of the store, which holds the signing keys; they follow their file."""

    is_known = True

    def __init__(self, signing_keys: SigningKeys | str) -> None:
        self._lines = SigningKeys(signing_keys) if isinstance(signing_keys, str) else signing_keys
        self._derived_from: tuple[bytes, ...] | None = None
        self._derive()

    def _derive(self) -> None:
        lines = self._lines.accepted()
        if lines is not self._derived_from:
            self._derived_from = lines
            self._own = own = tuple(RoleKey(line) for line in lines)
            self._set = KeySet(
                lambda: [key.public for key in own], attempts=tuple(attempt_secret(line) for line in lines)
            )

    def __bool__(self) -> bool:
        return bool(self._lines)

    def current(self) -> KeySet:
        """Returns the keys; a new object after a change."""
        self._derive()
        return self._set

    def signing(self) -> RoleKey:
        """Returns the key that signs."""
        self._derive()
        return self._own[0]

    def lines(self) -> tuple[bytes, ...]:
        """Returns the signing keys, from which further keys are derived; a new object after a change."""
        return self._lines.accepted()

    def published(self) -> tuple[bytes, ...]:
        """Returns all public keys, the signing key's first."""
        self._derive()
        return tuple(key.public for key in self._own)


class PublishedKeys:
    """The keys of a service other than the store: public keys as the store publishes them, and its own attempt secrets."""

    def __init__(self, attempt_secrets: SigningKeys | str = "", *, file: Path | None = None) -> None:
        """Reads the public keys that were kept.

        Args:
            attempt_secrets: Secrets of attempt keys; by default attempt keys are not accepted.
            file: Keeps the public keys for a start while the store is away; by default they are not kept. It must be
                writable by this service alone.
        """
        self._secrets = SigningKeys(attempt_secrets) if isinstance(attempt_secrets, str) else attempt_secrets
        self._file = file
        self._public = () if file is None else _kept(file)
        self._set = self._set_of(self._secrets.accepted())

    @property
    def is_known(self) -> bool:
        """True if the store's keys are known yet."""
        return bool(self._public)

    def current(self) -> KeySet:
        """Returns the keys; a new object after a change."""
        attempts = self._secrets.accepted()
        if attempts is not self._set.attempts:
            self._set = self._set_of(attempts)
        return self._set

    def replace(self, public_keys: Iterable[bytes]) -> None:
        """Replaces the public keys; an empty list, which no store with keys sends, changes nothing."""
        found = tuple(key for key in public_keys if len(key) == PUBLIC_KEY_BYTES)
        if found and found != self._public:
            self._public = found
            self._set = self._set_of(self._set.attempts)
            if self._file is not None:
                _keep(self._file, found)

    def _set_of(self, attempts: tuple[bytes, ...]) -> KeySet:
        public = self._public
        return KeySet(lambda: public, attempts=attempts)


def attempt_secret(signing_key: bytes) -> bytes:
    """Returns the secret of attempt keys that belongs to a signing key, as text in base64url."""
    return base64.urlsafe_b64encode(hmac.digest(signing_key, _ATTEMPT_LABEL, "sha256")).rstrip(b"=")


def attempt_secrets(signing_keys: str) -> str:
    """Returns the value of the proxy's setting `attempt_key_secret` that belongs to the store's `signing_key`."""
    return "\n".join(attempt_secret(line).decode() for line in split_keys(signing_keys))


def key_id(public_key: bytes) -> str:
    """Returns the thumbprint of a public key (RFC 7638 and RFC 8037)."""
    text = base64.urlsafe_b64encode(public_key).rstrip(b"=").decode()
    digest = hashlib.sha256(f'{{"crv":"Ed25519","kty":"OKP","x":"{text}"}}'.encode()).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def token_header(public_key: bytes) -> bytes:
    """Returns the encoded header of the role tokens that a key signs."""
    header = f'{{"alg":"EdDSA","kid":"{key_id(public_key)}","typ":"JWT"}}'
    return base64.urlsafe_b64encode(header.encode()).rstrip(b"=")


def _kept(file: Path) -> tuple[bytes, ...]:
    try:
        found = tuple(bytes.fromhex(line) for line in file.read_text(encoding="ascii").split())
    except FileNotFoundError:
        return ()
    except (OSError, ValueError):
        _log.warning("public_keys_not_read", path=str(file))
        return ()
    return tuple(key for key in found if len(key) == PUBLIC_KEY_BYTES)


def _keep(file: Path, public_keys: Iterable[bytes]) -> None:
    scratch = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        scratch.write_text("".join(f"{key.hex()}\n" for key in public_keys), encoding="ascii")
        scratch.replace(file)
    except OSError as error:
        _log.warning("public_keys_not_kept", path=str(file), error=error.strerror)
