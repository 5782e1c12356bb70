"""Codes that sign a browser in once: `fulmen open` gets one with the person's token and puts it into the address, never the token."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

__all__ = ["CODE_S", "SignInCodes"]

CODE_S: Final = 60.0
"""Time for which a code is valid, seconds."""
_MAX_CODES: Final = 10_000


class SignInCodes:
    """The codes of this process that were not used yet."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def issue(self, token: str) -> str:
        """Returns a code that stands for a token once."""
        self._drop_old()
        code = secrets.token_urlsafe(32)
        self._tokens[code] = (token, self._clock() + CODE_S)
        return code

    def take(self, code: str) -> str | None:
        """Returns the token of a code, which is used up; None if it is unknown, used or too old."""
        self._drop_old()
        found = self._tokens.pop(code, None)
        return None if found is None else found[0]

    def _drop_old(self) -> None:
        now_s = self._clock()
        while self._tokens and (len(self._tokens) >= _MAX_CODES or next(iter(self._tokens.values()))[1] < now_s):
            self._tokens.popitem(last=False)
