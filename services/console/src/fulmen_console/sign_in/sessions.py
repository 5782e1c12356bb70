"""Sessions: the caller's own token, encrypted, in a cookie of the browser. The console keeps none of them.

A session ends with its token, after a time without calls, and after its maximum time; revoking the token ends it immediately.
"""

from __future__ import annotations

import base64
import binascii
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Final

from fulmen_service_kit.security.sealing import CannotOpen, Sealer
from fulmen_service_kit.security.secret import SigningKeys

__all__ = ["COOKIE", "Session", "Sessions"]

COOKIE: Final = "fulmen_session"
_LABEL: Final = b"fulmen console sessions"
_ABOUT: Final = "session"
MAX_TOKEN_BYTES: Final = 2048
# A cookie is renewed when this share of its time has passed.
_RENEWED_AFTER: Final = 0.1


@dataclass(frozen=True, slots=True)
class Session:
    """A session.

    Attributes:
        token: Token of the person who signed in.
        begun_s: When it began, Unix seconds.
        used_s: When it was last written, Unix seconds.
    """

    token: str
    begun_s: float
    used_s: float

    def __repr__(self) -> str:
        return f"Session(begun_s={self.begun_s})"


class Sessions:
    """Reads and writes the cookies of sessions."""

    def __init__(
        self,
        keys: SigningKeys | None = None,
        *,
        idle_s: float,
        max_s: float,
        path: str = "/",
        is_secure: bool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Initializes the sessions.

        Args:
            keys: Keys that cookies are encrypted with; by default a new one.
            idle_s: Time without a call after which a session ends, seconds.
            max_s: Maximum time of a session, seconds.
            path: Path of the cookie.
            is_secure: Whether browsers send it over HTTPS only.
            clock: Unix seconds.
        """
        own = (secrets.token_bytes(32),)
        self._sealer = Sealer(lambda: (keys.accepted() if keys is not None else ()) or own, _LABEL)
        self._idle_s, self._max_s = idle_s, max_s
        self._attributes = f"; Path={path}; HttpOnly; SameSite=Strict" + ("; Secure" if is_secure else "")
        self._clock = clock

    def begin(self, token: str) -> str:
        """Returns the cookie of a new session, the value of a header `Set-Cookie`."""
        now_s = self._clock()
        return self._cookie(Session(token, now_s, now_s))

    def renewed(self, session: Session) -> str:
        """Returns the cookie that extends a session; empty if it is too early."""
        now_s = self._clock()
        if now_s - session.used_s < self._idle_s * _RENEWED_AFTER:
            return ""
        return self._cookie(Session(session.token, session.begun_s, now_s))

    def end(self) -> str:
        """Returns the cookie that removes a session from its browser."""
        return f"{COOKIE}={self._attributes}; Max-Age=0"

    def of_cookie(self, text: str) -> Session | None:
        """Returns the session in a header `Cookie`; None if there is none that is valid now."""
        try:
            found = SimpleCookie(text).get(COOKIE)
            if found is None:
                return None
            opened = self._sealer.open(base64.urlsafe_b64decode(found.value + "=="), about=_ABOUT)
        except (CookieError, CannotOpen, binascii.Error, ValueError):
            return None
        session = Session(*json.loads(opened))
        now_s = self._clock()
        if now_s - session.used_s > self._idle_s or now_s - session.begun_s > self._max_s:
            return None
        return session

    def _cookie(self, session: Session) -> str:
        sealed = self._sealer.seal(json.dumps([session.token, session.begun_s, session.used_s]).encode(), about=_ABOUT)
        left_s = min(self._idle_s, session.begun_s + self._max_s - session.used_s)
        value = base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()
        return f"{COOKIE}={value}{self._attributes}; Max-Age={max(0, int(left_s))}"
