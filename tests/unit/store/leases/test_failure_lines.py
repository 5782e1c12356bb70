"""The one line that tells what failed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulmen_store.leases.codec import MAX_LINE_CHARS, failure_line

TRACEBACK = """Traceback (most recent call last):
  File "agent.py", line 3, in solve
    raise ValueError("no\\nanswer")
ValueError: no
answer"""
CHAINED = f"""{TRACEBACK}

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "agent.py", line 9, in solve
KeyError: 'x'"""
NODE = """exited with status 1
/srv/agent.js:3
  throw new Error("boom")
  ^

Error: boom
    at Object.<anonymous> (/srv/agent.js:3:9)

Node.js v22.1.0"""
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "agent.py", line 2, in solve
  | ExceptionGroup: two (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: one
    +------------------------------------"""


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("", None),
        (" \n\t\n", None),
        ("agent cancelled itself", "agent cancelled itself"),
        ("the first\nthe second", "the first"),
        (TRACEBACK, "ValueError: no"),
        (CHAINED, "KeyError: 'x'"),
        (f"grader failed: {TRACEBACK}", "grader failed: ValueError: no"),
        (f"agent.py cannot be imported\n{TRACEBACK}", "agent.py cannot be imported: ValueError: no"),
        (f"exited with status 1\nloading\n{TRACEBACK}", "exited with status 1: ValueError: no"),
        (NODE, "exited with status 1: Error: boom"),
        ("exited with status 7\nnothing to see", "exited with status 7"),
        ('  File "agent.py", line 3, in solve\n    x = 1\nValueError: no', "ValueError: no"),
        ("a\0b\x1b[31m", "a b [31m"),
    ],
)
def test_the_line_names_the_error(message: str, line: str | None) -> None:
    assert failure_line(message) == line


def test_a_group_of_exceptions_has_a_line() -> None:
    assert failure_line(GROUP)


@given(st.text(max_size=400) | st.text(alphabet="Traceback (most recent call last):\n |+-xE", max_size=600))
def test_it_is_short_printable_and_one_line_whatever_the_message_is(message: str) -> None:
    line = failure_line(message)
    assert line is None or (0 < len(line) <= MAX_LINE_CHARS and line.isprintable())
