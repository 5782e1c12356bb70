"""Golden screens: what a command prints is compared with a file of tests/unit/cli/screens.

FULMEN_TEST_UPDATE_SCREENS=1 writes the files anew: read the difference before you commit it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from rich.console import Console, RenderableType

__all__ = ["check_screen", "rendered"]

SCREENS = Path(__file__).parents[2] / "unit/cli/screens"
WIDTH = 120
# What differs from run to run, and its name in the files. Padding after it depends on its length, and goes too.
_VARIABLE = (
    (re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12} *"), "UUID "),
    (re.compile(r"127\.0\.0\.1:\d+ *"), "ADDRESS "),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"), "YYYY-MM-DD HH:MM:SS"),
)
_DURATION = re.compile(r" *\b\d+(\.\d+)? ?(ms|s)\b")
# Services that run in the process of a test log to its standard error.
_LOG = '{"event":'


def rendered(renderable: RenderableType) -> str:
    """Returns what rich prints, without colours."""
    console = Console(width=WIDTH, color_system=None, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def check_screen(name: str, text: str, *, durations: bool = False, **masked: str) -> None:
    """Compares a screen with its file.

    Args:
        name: Name of the file.
        text: The screen.
        durations: Whether it has durations, which differ from run to run.
        masked: Texts that differ from run to run, by what stands for each in the file.
    """
    for placeholder, value in masked.items():
        text = text.replace(value, placeholder.upper())
    for pattern, placeholder in _VARIABLE:
        text = pattern.sub(placeholder, text)
    if durations:
        text = _DURATION.sub(" TIME", text)
    text = "".join(f"{line.rstrip()}\n" for line in text.splitlines() if not line.startswith(_LOG))
    file = SCREENS / f"{name}.txt"
    if os.environ.get("FULMEN_TEST_UPDATE_SCREENS"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.exists(), f"{file} does not exist: run the test with FULMEN_TEST_UPDATE_SCREENS=1"
    assert text == file.read_text(encoding="utf-8")
