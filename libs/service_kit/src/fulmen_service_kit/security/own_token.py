"""The token that the store issues to itself."""

import math
import time
from collections.abc import Callable

from fulmen_service_kit.security.keys import RoleKey
from fulmen_service_kit.security.tokens import Role, TokenSigner


class OwnToken:
    """A token of role SERVICE that the store issues to itself, renewed at half of its validity and when the keys change."""

    def __init__(
        self,
        signer: TokenSigner,
        *,
        subject: str,
        project: str | None = None,
        ttl_s: float = 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Initializes the token; see `TokenSigner.issue` for the arguments. `clock` only grows, seconds."""
        self._signer = signer
        self._subject, self._project, self._ttl_s = subject, project, ttl_s
        self._clock = clock
        self._token, self._renew_at_s = "", -math.inf
        self._key: RoleKey | None = None

    def __call__(self) -> str:
        """Returns the token; empty without a key."""
        keys = self._signer.keys
        if not keys:
            return ""
        key = keys.signing()
        if self._clock() >= self._renew_at_s or key is not self._key:
            self._token = self._signer.issue(
                Role.SERVICE, subject=self._subject, ttl_s=self._ttl_s, project=self._project
            )
            self._key, self._renew_at_s = key, self._clock() + self._ttl_s / 2
        return self._token
