"""What the program imports for its first word alone is what the whole program has."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest
import typer

from fulmen_cli.main import app
from fulmen_cli.words import WORDS, app_of, overview
from tests.support.cli.command_runner import built

WHOLE = built(app)
LIMIT_S = 60


def tree(command: click.Command) -> dict[str, object]:
    """Returns the commands below a command, with their help and options."""
    children = {name: tree(child) for name, child in getattr(command, "commands", {}).items()}
    return {"help": command.help, "options": [option.name for option in command.params], "commands": children}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the program, and prints the modules that it has loaded to standard error."""
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sorted(sys.modules), file=sys.stderr));"
        "from fulmen_cli.entry import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("word", WORDS)
def test_a_word_has_the_commands_of_the_whole_program(word: str) -> None:
    assert tree(typer.main.get_command(app_of(word)).commands[word]) == tree(WHOLE.commands[word])


def test_the_overview_says_of_every_word_what_the_whole_program_says() -> None:
    said = {name: command.help for name, command in typer.main.get_command(overview()).commands.items()}
    assert list(said.items()) == [
        (name, (command.help or "").partition("\n\n")[0]) for name, command in WHOLE.commands.items()
    ]


def test_help_and_version_load_no_command() -> None:
    for option in ("--help", "--version"):
        ran = run(option)
        assert ran.returncode == 0, ran.stderr
        loaded = set(ran.stderr.split())
        assert not {"grpc", "google.protobuf", "asyncio"} & loaded
        assert {name for name in loaded if name.startswith("fulmen")} == {
            "fulmen_cli", "fulmen_cli.entry", "fulmen_cli.words",
        }  # fmt: skip


def test_a_shell_completes_words_and_the_commands_below_them() -> None:
    first = run(_FULMEN_COMPLETE="complete_bash", COMP_WORDS="fulmen r", COMP_CWORD="1")
    below = run(_FULMEN_COMPLETE="complete_bash", COMP_WORDS="fulmen run w", COMP_CWORD="2")

    assert {"run", "rollout", "runner", "runners", "resources"} <= set(first.stdout.split())
    assert "watch" in below.stdout.split()


def test_a_word_that_there_is_not_is_told_with_the_nearest() -> None:
    ran = run("trian")

    assert ran.returncode == 2
    assert "train" in ran.stderr.partition("_abc")[0]
