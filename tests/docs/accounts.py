"""Counts how the code blocks of the documentation are held to what they say: `make test-docs` prints it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.docs.scenes import SCENES
from tests.support.docs.blocks import NO_CODE, RUN_ELSEWHERE, Block, blocks

__all__ = ["RUN_HERE", "Account", "account", "held"]

RUN_HERE = {place for scene in SCENES for place in scene.blocks}
READ = {
    "sh": "the shell's syntax, and the commands, options, targets and files of ours in it",
    "console": "likewise, without what is printed",
    "python": "compiled, and what it imports exists",
    "toml": "read by the settings that it is for",
    "json": "parsed",
    "yaml": "rendered by the chart",
}


@dataclass(frozen=True, slots=True)
class Account:
    """How many blocks are held in which way."""

    ways: Counter[str]
    excuses: Counter[str]

    @property
    def marked(self) -> int:
        """How many blocks nothing runs or reads."""
        return self.excuses.total()

    @property
    def total(self) -> int:
        """How many blocks there are."""
        return self.ways.total() + self.marked

    def lines(self) -> list[str]:
        """Returns what to print."""
        run = self.ways["run"]
        lines = [
            f"code blocks of the documentation: {self.total}; run {run}, read but not run {self.total - run - self.marked}, "
            f"neither {self.marked} ({self.marked / self.total:.0%})"
        ]
        lines += [f"  read {count:3} {way}: {READ[way]}" for way, count in self.ways.most_common() if way != "run"]
        return lines + [f"  neither {count}: {excuse}" for excuse, count in self.excuses.most_common()]


def held(block: Block) -> str | None:
    """Returns how a block is held: `run`, the language that it is read as, `marked`; None if nothing holds it."""
    if block.language in NO_CODE:
        return "no code"
    if block.excuse:
        return "marked"
    if (block.page, block.language) in RUN_ELSEWHERE or (block.page, first_line(block)) in RUN_HERE:
        return "run"
    return block.language if block.language in READ else None


def first_line(block: Block) -> str:
    """Returns the line by which a scene names a block."""
    return block.text.splitlines()[0].partition("  #")[0].strip()


def account() -> Account:
    """Counts all blocks."""
    all_blocks = [(block, held(block)) for block in blocks()]
    ways = Counter(way for _, way in all_blocks if way not in (None, "marked", "no code"))
    return Account(ways, Counter(block.excuse for block, way in all_blocks if way == "marked"))
