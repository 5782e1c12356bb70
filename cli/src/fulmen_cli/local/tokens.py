"""Signs tokens with a deployment's key; the service kit, which does it, is part of the extra `local`."""

from __future__ import annotations

from typing import Final

from fulmen_cli.local.errors import extra_needed

__all__ = ["ROLES", "issue_token"]

ROLES: Final = ("admin", "service", "runner", "client", "reader")


def issue_token(signing_key: str, role: str, *, subject: str, ttl_s: float, project: str | None = None) -> str:
    """Signs a token.

    Args:
        signing_key: the deployment's key.
        role: one of `ROLES`.
        subject: who it is for; shows up in logs.
        ttl_s: how long it is good, in seconds.
        project: what the token is bound to, `projects/*` for all; None: all for admin, service and runner, the default
            project for client and reader.

    Raises:
        ExtraMissingError: if the service kit is not installed.
    """
    with extra_needed("Tokens are signed by the service kit"):
        from fulmen_service_kit.tokens import Role, TokenSigner
    return TokenSigner(signing_key).issue(Role(role), subject=subject, ttl_s=ttl_s, project=project)
