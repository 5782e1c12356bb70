"""Secrets of a service: from its environment, or from files that may change at runtime."""

from pathlib import Path
from typing import Final

import structlog

from fulmen.watched_file import WatchedFile

MIN_KEY_BYTES: Final = 32

_log = structlog.get_logger()


class Secret:
    """A secret text, masked in its repr. With a file, it follows the file's content."""

    def __init__(self, text: str = "", *, file: WatchedFile | None = None) -> None:
        self._file = file
        self._text = text if file is None else text_of(file)
        self._version = 0 if file is None else file.version

    @property
    def path(self) -> Path | None:
        """File that the secret follows; None without one."""
        return None if self._file is None else self._file.path

    def __call__(self) -> str:
        """Returns the current text; if the file is not valid UTF-8, the previous one."""
        if self._file is not None:
            self._file.content()
            if self._file.version != self._version:
                self._version = self._file.version
                try:
                    self._text = text_of(self._file)
                except UnicodeDecodeError:
                    _log.error("secret_refused", path=str(self._file.path), reason="not UTF-8")
        return self._text

    def __repr__(self) -> str:
        return "Secret('**********')"


class SigningKeys:
    """Signing keys of a deployment: the first signs, all are accepted.

    To rotate the key without a restart: add the new key as the second line of the file, make it the first line, and
    remove the old one when its tokens are no longer needed.
    """

    def __init__(self, secret: Secret | str) -> None:
        """Initializes the keys from a secret with one key per line."""
        self._secret = Secret(secret) if isinstance(secret, str) else secret
        self._text = self._secret()
        self._keys = split_keys(self._text)

    def accepted(self) -> tuple[bytes, ...]:
        """Returns all keys, the signing one first; a new object after a change."""
        text = self._secret()
        if text is not self._text:
            keys = split_keys(text)
            if keys and problem_of(keys) is None:
                self._keys = keys
                _log.info("signing_keys_changed", count=len(keys))
            else:
                _log.error("signing_keys_refused", reason=problem_of(keys) or "no key")
            self._text = text
        return self._keys

    def signing(self) -> bytes:
        """Returns the signing key."""
        return self.accepted()[0]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __repr__(self) -> str:
        return f"SigningKeys(count={len(self._keys)})"


def split_keys(text: str) -> tuple[bytes, ...]:
    """Returns the non-empty lines of a text as keys."""
    return tuple(line.strip().encode() for line in text.splitlines() if line.strip())


def problem_of(keys: tuple[bytes, ...]) -> str | None:
    """Returns the problem of keys, or None."""
    if any(len(key) < MIN_KEY_BYTES for key in keys):
        return f"must have at least {MIN_KEY_BYTES} bytes in every line (`fulmen token --new-key` prints a new key)"
    return None


def text_of(file: WatchedFile) -> str:
    """Returns a file's text without the final newline.

    Raises:
        UnicodeDecodeError: If it is not UTF-8.
    """
    return file.content().decode().rstrip("\r\n")
