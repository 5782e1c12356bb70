"""The secrets of a local stack, in the state directory, readable by the owner only; and signing tokens.

Keys are created once. Tokens live days, and are issued again at every start; services refresh their own meanwhile.
"""

from __future__ import annotations

import secrets
from datetime import timedelta
from pathlib import Path
from typing import Final

from fulmen_cli.local.errors import extra_needed
from fulmen_cli.local.record import write_atomically

__all__ = ["Credentials", "ROLES", "attempt_secrets", "issue_token"]

SIGNING_KEY_FILE: Final = "signing.key"
ENGINE_KEY_FILE: Final = "engine.key"
CLIENT_CREDENTIAL_FILE: Final = "client.token"
ATTEMPT_KEYS_FILE: Final = "attempt.key"
TOKEN_LIFETIME: Final = timedelta(days=14)
SECRET_BYTES: Final = 48


class Credentials:
    """Reads the secrets of a state directory, creating missing ones."""

    def __init__(self, folder: Path) -> None:
        """Touches nothing yet."""
        self._folder = folder

    @property
    def client_token_file(self) -> Path:
        """The file with the token that the command line uses."""
        return self._folder / CLIENT_CREDENTIAL_FILE

    @property
    def signing_key_file(self) -> Path:
        """The file with the key that signs every token of this stack."""
        return self._folder / SIGNING_KEY_FILE

    def signing_key(self) -> str:
        """Returns the deployment's signing key."""
        return self._make_once(self.signing_key_file)

    def engine_token(self) -> str:
        """Returns the key that the proxy presents to the algorithm service's generation engine."""
        return self._make_once(self._folder / ENGINE_KEY_FILE)

    def attempt_secret_file(self) -> Path:
        """Writes and returns the file with the proxy's secret of attempt keys."""
        path = self._folder / ATTEMPT_KEYS_FILE
        write_atomically(path, attempt_secrets(self.signing_key()) + "\n", private=True)
        return path

    def token_file(self, role: str, *, project: str | None = None) -> Path:
        """Issues a token to the services of a role; writes and returns its file, which they keep fresh.

        Args:
            role: Role of the services.
            project: Project that they serve; by default all.
        """
        path = self._folder / f"{role}.token"
        self._write_token(path, role, project=project)
        return path

    def renew_client_token(self) -> None:
        """Issues the token that the command line uses; the user of the machine is admin."""
        self._write_token(self.client_token_file, "admin")

    def _write_token(self, path: Path, role: str, *, project: str | None = None) -> None:
        ttl_s = TOKEN_LIFETIME.total_seconds()
        token = issue_token(self.signing_key(), role, subject=f"local-{role}", ttl_s=ttl_s, project=project)
        write_atomically(path, token + "\n", private=True)

    def _make_once(self, path: Path) -> str:
        if not path.exists():
            write_atomically(path, secrets.token_urlsafe(SECRET_BYTES) + "\n", private=True)
        return path.read_text(encoding="utf-8").strip()


ROLES: Final = ("admin", "service", "runner", "client", "reader")


def issue_token(signing_key: str, role: str, *, subject: str, ttl_s: float, project: str | None = None) -> str:
    """Signs a token.

    Args:
        signing_key: the deployment's key.
        role: one of `ROLES`.
        subject: Owner, as shown in logs.
        ttl_s: Lifetime, seconds.
        project: Project of the token, `projects/*` for all; by default all for admin, service and runner, the default
            project for client and reader.

    Raises:
        ExtraMissingError: if the service kit is not installed.
    """
    with extra_needed("Tokens are signed by the service kit"):
        from fulmen_service_kit.security.tokens import Role, TokenSigner
    return TokenSigner(signing_key).issue(Role(role), subject=subject, ttl_s=ttl_s, project=project)


def attempt_secrets(signing_keys: str) -> str:
    """Returns the proxy's secret of attempt keys for signing keys, one per line.

    Raises:
        ExtraMissingError: if the service kit is not installed.
    """
    with extra_needed("Keys are derived by the service kit"):
        from fulmen_service_kit.security import keys
    return keys.attempt_secrets(signing_keys)
