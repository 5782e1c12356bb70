"""Signs tokens with a deployment's key, by the service kit if it is installed.

The service kit builds on this package, so it is no dependency of it but part of the extra `local`: it is imported by
name, at the moment it is needed, and a missing one is a clear error.
"""

from __future__ import annotations

import importlib
from typing import Final

from fulmen.local.errors import ExtraMissingError

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
    try:
        kit = importlib.import_module("fulmen_service_kit.tokens")
    except ModuleNotFoundError:
        raise ExtraMissingError('Tokens are signed by the service kit: pip install "fulmen[local]".') from None
    signer = kit.TokenSigner(signing_key)
    token: str = signer.issue(kit.Role(role), subject=subject, ttl_s=ttl_s, project=project)
    return token
