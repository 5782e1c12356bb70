"""Removes secrets, prompts and agents' output from diagnostics.

Invariant: of a log only lines leave that a service has structured, and of these only numbers and words: no sentence, no
text of an error, nothing that is, or looks like, a secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

__all__ = ["MASK", "Scrubber", "secrets_in"]

MASK: Final = "**********"
LEFT_OUT: Final = "(left out)"
# Shorter ones would mask words.
MIN_SECRET: Final = 8
_SECRET_NAME: Final = re.compile(
    r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|AUTH|COOKIE|HEADERS|ENGINES|ENDPOINTS|ALERTS_URL", re.I
)
_SECRET_SHAPES: Final = (
    re.compile(r"eyJ[\w-]{4,}\.[\w-]+\.[\w-]+"),
    re.compile(r"\bsk-[\w-]{8,}"),
    re.compile(r"(?i)\bbearer\s+[^\s\"',;]+"),
    re.compile(r"(?<=://)[^/\s@\"']+(?=@)"),
)
# May contain prompts, answers, or unexpected error texts.
_FREE_TEXT: Final = frozenset(
    {"exception", "stack", "stdout", "stderr", "output", "outcome", "input", "prompt", "body", "content", "message", "text",
     "task", "line", "answer", "request", "response"}
)  # fmt: skip
# Events are constants of the code.
_EVENT: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
_WORD: Final = re.compile(r"\S{0,256}")
_FRAME: Final = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)$', re.M)


def secrets_in(environment: Mapping[str, str]) -> Iterator[str]:
    """Yields the values of variables whose names indicate a secret, or a file with one."""
    for name, value in environment.items():
        if not _SECRET_NAME.search(name):
            continue
        yield value
        if name.endswith("_FILE"):
            with suppress(OSError):
                yield Path(value).read_text(encoding="utf-8", errors="replace").strip()


class Scrubber:
    """Masks known secrets, and everything that looks like one."""

    def __init__(self, secrets: Iterable[str]) -> None:
        """Takes the known secrets of the deployment."""
        self._known = sorted({each for each in secrets if len(each) >= MIN_SECRET}, key=len, reverse=True)

    def text(self, text: str) -> str:
        """Returns a text with every secret masked."""
        for secret in self._known:
            text = text.replace(secret, MASK)
        for shape in _SECRET_SHAPES:
            text = shape.sub(MASK, text)
        return text

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns variables, with secrets masked by name."""
        return {
            name: MASK if value and _SECRET_NAME.search(name) else self.text(value)
            for name, value in sorted(environment.items())
        }

    def log(self, lines: Iterable[str]) -> Iterator[str]:
        """Yields the structured lines of a log, and the number of others, which may be an agent's output."""
        left_out = 0
        for line in lines:
            # Of containers' logs: `store_1-1  | {...}`.
            begin = line.find("{")
            try:
                event = json.loads(line[begin:]) if begin >= 0 else None
            except json.JSONDecodeError:
                event = None
            if isinstance(event, dict) and "service" in event and _EVENT.fullmatch(str(event.get("event"))):
                yield self.text(
                    json.dumps({key: _scrubbed(key, value) for key, value in event.items()}, ensure_ascii=False)
                )
            else:
                left_out += 1
        if left_out:
            yield json.dumps({"event": "lines_left_out", "count": left_out})


def _scrubbed(key: str, value: Any) -> Any:
    if key == "exception" and isinstance(value, str):
        return [f"{file}:{number} in {name}" for file, number, name in _FRAME.findall(value)]
    plain = isinstance(value, int | float | None) or (isinstance(value, str) and _WORD.fullmatch(value))
    return value if plain and key not in _FREE_TEXT else LEFT_OUT
