"""Secrets of a service: from its environment, or from files that may change while it runs."""

from typing import Final

import structlog

from fulmen.watched_file import WatchedFile

MIN_KEY_BYTES: Final = 32

_log = structlog.get_logger()


class Secret:
    """A text that is never shown. One from a file follows that file."""

    def __init__(self, text: str = "", *, file: WatchedFile | None = None) -> None:
        """Takes the text, or the file that holds it."""
        self._file = file
        self._text = text if file is None else text_of(file)
        self._version = 0 if file is None else file.version

    def __call__(self) -> str:
        """Returns the text as it is now; what is no text leaves the one before in force."""
        if self._file is not None:
            self._file.content()
            if self._file.version != self._version:
                self._version = self._file.version
                try:
                    self._text = text_of(self._file)
                except UnicodeDecodeError:
                    _log.error("secret_refused", path=str(self._file.path), reason="it is no UTF-8")
        return self._text

    def __repr__(self) -> str:
        return "Secret('**********')"


class SigningKeys:
    """The keys of a deployment's tokens: the first one signs, all of them are accepted.

    A deployment changes its key in three steps, none of which needs a restart: add the new key as the second line of the
    file, make it the first line, and take the old one away when no token that it signed is needed any more.
    """

    def __init__(self, secret: Secret | str) -> None:
        """Takes the keys, one a line."""
        self._secret = Secret(secret) if isinstance(secret, str) else secret
        self._text = self._secret()
        self._keys = split_keys(self._text)

    def accepted(self) -> tuple[bytes, ...]:
        """Returns the keys, that which signs first; another object once they have changed."""
        text = self._secret()
        if text is not self._text:
            keys = split_keys(text)
            if keys and problem_of(keys) is None:
                self._keys = keys
                _log.info("signing_keys_changed", count=len(keys))
            else:
                _log.error("signing_keys_refused", reason=problem_of(keys) or "there is none")
            self._text = text
        return self._keys

    def signing(self) -> bytes:
        """Returns the key that signs."""
        return self.accepted()[0]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __repr__(self) -> str:
        return f"SigningKeys(count={len(self._keys)})"


def split_keys(text: str) -> tuple[bytes, ...]:
    """Returns the keys of a text: its lines, empty ones left out."""
    return tuple(line.strip().encode() for line in text.splitlines() if line.strip())


def problem_of(keys: tuple[bytes, ...]) -> str | None:
    """Returns what is wrong with keys, or None."""
    if any(len(key) < MIN_KEY_BYTES for key in keys):
        return f"needs at least {MIN_KEY_BYTES} bytes in every line (`fulmen token --new-key` makes a key)"
    return None


def text_of(file: WatchedFile) -> str:
    """Returns a file's text, without the end of its last line.

    Raises:
        UnicodeDecodeError: if it is no UTF-8.
    """
    return file.content().decode().rstrip("\r\n")
