"""What others have written is shown as it is, and no terminal obeys it."""

from __future__ import annotations

import pytest
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from fulmen_cli.exits import CommandFailed, Exit, reported
from fulmen_cli.output import console
from fulmen_cli.printable import printable

HOSTILE = "[/tmp/x] [red]said[/red] :warning: \x1b]52;c;cHduZWQ=\x07\x1b[2J\x9b31m\r\x08\x00 two\nlines\tof it"
SHOWN = "[/tmp/x] [red]said[/red] :warning: ]52;c;cHduZWQ=[2J31m two\nlines"
"""But for the signs in place of control characters."""


def table_of(text: str) -> Table:
    table = Table("one", text)
    table.add_row(text, Text(text))
    return table


@pytest.mark.parametrize(
    "shown", [HOSTILE, Text(HOSTILE), Text(HOSTILE, style="red"), table_of(HOSTILE), Tree(HOSTILE)]
)
def test_texts_of_others_are_neither_markup_nor_commands(shown: object, capsys: pytest.CaptureFixture[str]) -> None:
    console().print(shown)
    printed = capsys.readouterr().out
    assert all(sign.isprintable() or sign in "\n\t" for sign in printed)
    for part in ("[/tmp/x]", "[red]said[/red]", ":warning:", "]52;c;"):
        assert part in printed


def test_what_is_no_control_character_stays() -> None:
    for text in ("1\u00a0000 \u20ac", "\U0001f469\u200d\U0001f4bb", "a\tb\n\u4e2d", "\ue000\U0001fae8"):
        assert printable(text) == text
    for sign in "\x00\x1b\x7f\x9b\r\u202e\u2028\ud83d\u200f":
        assert printable(f"a{sign}b") == "a\N{REPLACEMENT CHARACTER}b"


def test_a_text_is_shown_whole(capsys: pytest.CaptureFixture[str]) -> None:
    console(stderr=True).print(HOSTILE)
    assert capsys.readouterr().err.replace("\N{REPLACEMENT CHARACTER}", "").startswith(SHOWN)


def test_progress_of_what_others_have_named_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(TextColumn("{task.fields[name]}", markup=False), console=console()) as shown:
        shown.add_task("", name=HOSTILE)
    assert "\x1b]52" not in capsys.readouterr().out


def test_errors_tell_the_texts_of_others_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception) as ended, reported():  # noqa: PT011  # typer's
        raise CommandFailed(HOSTILE, exit_code=Exit.CONFLICT)
    assert getattr(ended.value, "exit_code", None) == Exit.CONFLICT
    assert capsys.readouterr().err.replace("\N{REPLACEMENT CHARACTER}", "").startswith(f"error: {SHOWN}")
