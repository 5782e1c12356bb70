"""The difference of two contents, line by line.

JSON is compared with sorted keys and one value per line, other text as is; binary content is not compared. The
algorithm (`difflib`) is quadratic in the worst case, so its steps are limited: contents that exceed the limit are
reported as too different.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

__all__ = ["Comparison", "compare"]

MAX_INPUT_BYTES: Final = 4 * 1024 * 1024
MAX_DIFF_BYTES: Final = 1024 * 1024
# A step is a visit of one pair of lines; about 2 million take a second.
MAX_STEPS: Final = 1_000_000
CONTEXT_LINES: Final = 3
NO_NEWLINE: Final = "\\ No newline at end of file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A difference.

    Attributes:
        unified_diff: Empty if the contents are equal, binary, too large or too different to compare.
        truncated: Whether `unified_diff` is incomplete.
    """

    unified_diff: str = ""
    truncated: bool = False


class _TooDifferent(Exception):
    """Comparing would take too long."""


def compare(base: bytes, target: bytes, *, base_name: str, target_name: str, is_json: bool = False) -> Comparison:
    """Compares two contents.

    Args:
        base: Older content.
        target: Newer content.
        base_name: Name of the older content in the diff.
        target_name: Name of the newer content in the diff.
        is_json: Whether both are declared as JSON. If not, or if only their formatting differs, they are compared as
            text.
    """
    if base == target:
        return Comparison()
    before, after = _text(base), _text(target)
    if before is None or after is None:
        return Comparison()
    if max(len(base), len(target)) > MAX_INPUT_BYTES:
        return Comparison(truncated=True)
    if is_json:
        pretty = _pretty(before), _pretty(after)
        if None not in pretty and pretty[0] != pretty[1]:
            before, after = pretty[0] or "", pretty[1] or ""
    try:
        lines = list(_unified(_lines(before), _lines(after)))
    except _TooDifferent:
        return Comparison(truncated=True)
    return _cut([f"--- {base_name}", f"+++ {target_name}", *lines])


def _text(content: bytes) -> str | None:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _pretty(text: str) -> str | None:
    try:
        return json.dumps(json.loads(text), indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    except (ValueError, RecursionError):
        # Not JSON, a number with too many digits, or nested too deeply.
        return None


def _lines(text: str) -> list[str]:
    """Splits at line feeds only; if the last one is missing, its marker becomes part of the last line."""
    lines = text.split("\n")
    if lines[-1]:
        lines[-1] += "\n" + NO_NEWLINE
    else:
        lines.pop()
    return lines


class _CountingMatcher(difflib.SequenceMatcher[str]):
    """A matcher that stops after `MAX_STEPS` steps."""

    a: Sequence[str]
    b2j: dict[str, list[int]]

    def __init__(self, before: Sequence[str], after: Sequence[str]) -> None:
        super().__init__(None, before, after)
        self._left = MAX_STEPS
        # Prefix sums of the pairs visited per line of the older text: one per equal line in the newer text.
        self._visits = list(accumulate((1 + len(self.b2j.get(line, ())) for line in before), initial=0))

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> difflib.Match:
        """Finds the longest equal stretch.

        Raises:
            _TooDifferent: If the steps are used up.
        """
        self._left -= self._visits[len(self.a) if ahi is None else ahi] - self._visits[alo]
        if self._left < 0:
            raise _TooDifferent
        return super().find_longest_match(alo, ahi, blo, bhi)


def _unified(before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    """Yields the lines of a unified diff, without the names."""
    # Strip the common prefix and suffix, except for the context, so that they cost no steps.
    skipped = max(0, _common(before, after) - CONTEXT_LINES)
    before, after = before[skipped:], after[skipped:]
    same = max(0, _common(before[::-1], after[::-1]) - CONTEXT_LINES)
    before, after = before[: len(before) - same], after[: len(after) - same]
    for group in _CountingMatcher(before, after).get_grouped_opcodes(CONTEXT_LINES):
        _, before_start, _, after_start, _ = group[0]
        _, _, before_end, _, after_end = group[-1]
        yield (
            f"@@ -{_range(before_start + skipped, before_end + skipped)}"
            f" +{_range(after_start + skipped, after_end + skipped)} @@"
        )
        for tag, i, j, k, m in group:
            if tag == "equal":
                yield from (f" {line}" for line in before[i:j])
                continue
            yield from (f"-{line}" for line in before[i:j])
            yield from (f"+{line}" for line in after[k:m])


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def _range(start: int, end: int) -> str:
    """Formats a range of lines like `diff -u`: numbered from 1; an empty range has the number of the line before it."""
    length = end - start
    if length == 1:
        return f"{start + 1}"
    return f"{start + 1 if length else start},{length}"


def _cut(lines: Sequence[str]) -> Comparison:
    size_bytes = 0
    for index, line in enumerate(lines):
        size_bytes += len(line.encode()) + 1
        if size_bytes > MAX_DIFF_BYTES:
            return Comparison(unified_diff="".join(f"{kept}\n" for kept in lines[:index]), truncated=True)
    return Comparison(unified_diff="".join(f"{line}\n" for line in lines))
