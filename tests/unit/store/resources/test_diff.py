"""The difference of two contents: as `diff -u` writes it, of JSON by value, and never for long."""

from __future__ import annotations

import difflib
import json
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_store.resources import diff as resource_diff
from fulmen_store.resources.diff import Comparison, compare


def diff(base: str | bytes, target: str | bytes, *, is_json: bool = False) -> Comparison:
    """Compares two contents called a and b."""
    contents = [each.encode() if isinstance(each, str) else each for each in (base, target)]
    return compare(contents[0], contents[1], base_name="a", target_name="b", is_json=is_json)


def test_text_is_compared_line_by_line() -> None:
    assert diff("one\ntwo\nthree\n", "one\n2\nthree\n").unified_diff == (
        "--- a\n+++ b\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n"
    )


def test_json_is_compared_by_key_whatever_its_order_and_layout() -> None:
    found = diff('{"b": 1, "a": [1, 2]}', '{"a":[1,3],"b":1}', is_json=True)
    assert found.unified_diff == (
        '--- a\n+++ b\n@@ -1,7 +1,7 @@\n {\n   "a": [\n     1,\n-    2\n+    3\n   ],\n   "b": 1\n }\n'
    )


def test_json_of_which_only_the_layout_differs_is_compared_as_text() -> None:
    found = diff('{"a": 1}', '{"a":1}', is_json=True)
    assert '-{"a": 1}' in found.unified_diff
    assert '+{"a":1}' in found.unified_diff


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "9" * 10_000, '{"a": 1} x'])
def test_what_is_no_json_is_compared_as_text(text: str) -> None:
    found = diff(text, "{}", is_json=True)
    assert "+{}" in found.unified_diff
    assert not found.truncated


def test_equal_contents_and_binary_ones_have_no_difference_to_tell() -> None:
    assert diff("same", "same") == Comparison()
    assert diff(b"\xff\xfe", b"text") == Comparison()
    assert diff(b"a\0b", b"a\0c") == Comparison()


def test_a_missing_last_line_feed_is_told() -> None:
    assert diff("a\nb\n", "a\nb").unified_diff == (
        "--- a\n+++ b\n@@ -1,2 +1,2 @@\n a\n-b\n+b\n\\ No newline at end of file\n"
    )


def test_a_long_difference_is_cut_at_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource_diff, "MAX_DIFF_BYTES", 60)
    found = diff("x\n", "".join(f"line {number}\n" for number in range(50)))
    assert found.truncated
    assert len(found.unified_diff) <= 60
    assert found.unified_diff.endswith("\n")
    assert "+line 2\n" in found.unified_diff


def test_too_large_and_too_different_contents_are_told_as_such_and_small_changes_of_large_ones_are_not() -> None:
    assert diff(b"x" * (resource_diff.MAX_INPUT_BYTES + 1), b"y") == Comparison(truncated=True)
    chance = random.Random(1)
    shuffled = [f"{chance.randrange(300)}\n" for _ in range(40_000)]
    other = [f"{chance.randrange(300)}\n" for _ in range(40_000)]
    assert diff("".join(shuffled), "".join(other)) == Comparison(truncated=True)
    changed = [*shuffled[:20_000], "new\n", *shuffled[20_000:]]
    found = diff("".join(shuffled), "".join(changed))
    assert "+new\n" in found.unified_diff
    assert "@@ -19998,6 +19998,7 @@" in found.unified_diff


lines = st.lists(st.sampled_from(["", "a", "b", "c", "{", "}", "é\r", "- x"]), max_size=30).map("\n".join)


@given(lines, lines, st.booleans(), st.booleans())
def test_it_is_the_difference_that_difflib_makes(first: str, second: str, end: bool, other_end: bool) -> None:
    first, second = first + "\n" * end, second + "\n" * other_end
    if first == second:
        return
    expected = "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(_kept(first), _kept(second), "a", "b", n=3)
    )
    found = diff(first, second).unified_diff
    assert _applied(first, found) == second
    # With the equal ends set aside difflib may choose other lines among equal ones, never more of them.
    assert len(found.splitlines()) <= len(expected.splitlines()) + 6


@pytest.mark.skipif(shutil.which("patch") is None, reason="no program to apply it")
def test_patch_takes_it(tmp_path: Path) -> None:
    chance = random.Random(2)
    before = [f"{chance.randrange(50)}" for _ in range(200)]
    after = [line for line in before if chance.random() > 0.1] + ["tail"]
    (tmp_path / "a").write_text("\n".join(before))
    found = diff("\n".join(before), "\n".join(after)).unified_diff
    subprocess.run(["patch", "-s", str(tmp_path / "a")], input=found.encode(), check=True)
    assert (tmp_path / "a").read_text() == "\n".join(after)


def test_values_of_json_are_written_as_json() -> None:
    found = diff(json.dumps({"k": None}), json.dumps({"k": "é"}), is_json=True)
    assert '+  "k": "é"\n' in found.unified_diff


def _kept(text: str) -> list[str]:
    kept = [f"{line}\n" for line in text.split("\n")]
    kept[-1] = kept[-1][:-1]
    return kept if kept[-1] else kept[:-1]


def _applied(text: str, unified: str) -> str:
    """Applies a unified diff."""
    source, result, position = _kept(text), list[str](), 0
    body = unified.split("\n")[2:-1]
    for index, line in enumerate(body):
        no_newline = index + 1 < len(body) and body[index + 1].startswith("\\")
        if line.startswith("@@"):
            first, _, count = line.split()[1][1:].partition(",")
            start = int(first) - (count != "0")
            result += source[position:start]
            position = start
        elif line.startswith((" ", "-")):
            assert source[position] == line[1:] + ("" if no_newline else "\n")
            position += 1
            if line.startswith(" "):
                result.append(line[1:] + ("" if no_newline else "\n"))
        elif line.startswith("+"):
            result.append(line[1:] + ("" if no_newline else "\n"))
    return "".join(result + source[position:])
