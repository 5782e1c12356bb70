"""The code blocks of all pages, and how each is held to what it says: run by a test, read by what it is written for, or neither.

A block that nothing runs or reads says why in a comment above it: `<!-- not run: needs a GPU -->`.
"""

from __future__ import annotations

import functools
import re
import subprocess
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.distributions import ROOT

__all__ = ["NO_CODE", "PAGES", "RUN_ELSEWHERE", "Block", "blocks", "code_blocks"]

PAGES = [
    name
    for name in subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    if (ROOT / name).exists()
]
# Pictures, formulas and what programs print.
NO_CODE = ("text", "mermaid")
# Generated of the commands' help, whose examples are indented.
INDENTED = ("docs/cli.md",)
# Blocks that tests elsewhere run as they stand, by page and language.
RUN_ELSEWHERE = {
    ("docs/python.md", "python"): "tests/e2e/test_python_api.py",
    ("libs/gradient_exchange/README.md", "python"): "tests/unit/exchange/test_readme.py",
}
FENCED = re.compile(
    r"^(?:[ ]*<!-- not run: (?P<excuse>[^\n]+?) -->\n)?(?P<indent>[ ]*)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.M | re.S,
)
EXAMPLE = re.compile(r"^    (fulmen .*\n(?:     *\S.*\n)*)", re.M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block.

    Args:
        page: Its page, from the root.
        line: Number of the first line of its text.
        language: What it is written in, as its fence says.
        text: The text, without indentation.
        excuse: Why nothing runs or reads it, if it says so.
    """

    page: str
    line: int
    language: str
    text: str
    excuse: str = ""

    def __str__(self) -> str:
        """Returns its place."""
        return f"{self.page}:{self.line}"

    @property
    def script(self) -> str:
        """What a shell would run: of a console session the lines behind a prompt."""
        if self.language != "console":
            return self.text
        return "".join(line[2:] for line in self.text.splitlines(keepends=True) if line.startswith("$ "))


def blocks() -> Iterator[Block]:
    """Yields the blocks of all pages."""
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for found in (EXAMPLE if page in INDENTED else FENCED).finditer(text):
            parts = {"language": "sh", "text": found[1]} if page in INDENTED else found.groupdict()
            body = textwrap.dedent(parts["text"]) if parts.get("indent") or page in INDENTED else parts["text"]
            line = text.count("\n", 0, found.start(1 if page in INDENTED else "text")) + 1
            yield Block(page=page, line=line, language=parts["language"], text=body, excuse=parts.get("excuse") or "")


@functools.cache
def code_blocks(*languages: str) -> tuple[Block, ...]:
    """Returns the blocks that are code, of some languages only if any are named, without those that have an excuse."""
    return tuple(
        b for b in blocks() if b.language not in NO_CODE and not b.excuse and b.language in (languages or (b.language,))
    )
