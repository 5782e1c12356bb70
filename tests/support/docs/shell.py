"""Reads the shell commands of the documentation as their programs would: options, targets, files and modules must exist."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer

from tests.support.distributions import ROOT

__all__ = ["Unread", "commands", "read"]

MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.M))
MAKE_VARIABLES = set(re.findall(r"\$[({](?:or \$\()?(\w+)[),}]", MAKEFILE)) | {"SECONDS"}
SEPARATORS = {"&&", "||", "|", ";", "&", "(", ")"}
KEYWORDS = {"do", "then", "else", "if", "while", "until", "!", "time", "exec"}
NO_COMMAND = {"for", "done", "fi", "case", "esac", "export"}
ASSIGNMENT = re.compile(r"\w+=")
LOOP = re.compile(r"\bfor (\w+) in (\S+)")
FILE = re.compile(r"[\w./-]+\.(?:py|toml|json|jsonl|md|txt|pem|crt|log|env)|[\w-]+key[\w-]*")
# Programs of others, of which only the shell's syntax is checked.
OF_OTHERS = {
    "base64",
    "cat",
    "cd",
    "createdb",
    "echo",
    "head",
    "kubectl",
    "npm",
    "pg_dump",
    "pip",
    "printf",
    "psql",
    "curl",
    "tar",
    "torchrun",
    "tr",
    "vllm",
}
# Programs of others, whose arguments may be files of ours.
NAME_FILES = {"docker", "helm", "."}
SERVICES = {"fulmen-store": "fulmen_store", "fulmen-runner": "fulmen_runner", "fulmen-algorithm": "fulmen_algorithm"}
SERVICES["fulmen-llm-proxy"], SERVICES["fulmen-console"] = "fulmen_llm_proxy", "fulmen_console"


class Unread(Exception):
    """A command is not one that its program takes; the message says why."""


def commands(script: str) -> Iterator[list[str]]:
    """Yields the words of every simple command of a script, without redirections; those of `$(...)` come by themselves."""
    for name, first in LOOP.findall(script):
        script = script.replace(f"${name}", first)
    pending = ""
    for line in script.replace("\\\n", " ").splitlines():
        pending += line + "\n"
        lexer = shlex.shlex(pending, posix=True, punctuation_chars="&|;()<>")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # a quotation that goes on in the next line
            continue
        for inner in re.findall(r"\$\(([^()]*)\)", pending):
            yield from commands(inner)
        pending = ""
        yield from _split(words)


def _split(words: Sequence[str]) -> Iterator[list[str]]:
    command: list[str] = []
    rest = iter([*words, ";"])
    for word in rest:
        if word in SEPARATORS:
            while command and (command[0] in KEYWORDS or ASSIGNMENT.match(command[0])):
                command.pop(0)
            if command and command[0] not in NO_COMMAND:
                yield command
            command = []
        elif set(word) <= {"<", ">", "&"}:
            next(rest)
        else:
            command.append(word)


def read(words: Sequence[str]) -> bool:
    """Reads a command as its program would; returns whether anything but its name was looked at.

    Raises:
        Unread: if the program would refuse it, or nothing is known of it.
    """
    program, *arguments = words
    if program == "fulmen" or program in SERVICES:
        _read_options(program, arguments)
    elif program == "make":
        _read_make(arguments)
    elif program == "python":
        _read_python(arguments)
    elif program in NAME_FILES:
        return _read_files(arguments)
    elif "/" in program:
        return _read_program(program)
    elif program not in OF_OTHERS:
        raise Unread(f"{program}: nothing is known of it; see tests/support/docs/shell.py")
    else:
        return False
    return True


@functools.cache
def command_line(program: str) -> Any:
    """Returns the command line of one of our programs."""
    if program == "fulmen":
        from fulmen_cli.main import app
        from tests.support.cli.command_runner import built

        return built(app)
    module = importlib.import_module(f"{SERVICES[program]}.__main__")
    return typer.main.get_command(module.main)


def _read_options(program: str, words: list[str]) -> None:
    command, path = command_line(program), [program]
    for word in words:
        if FILE.fullmatch(word) and not Path(word).is_absolute() and not Path(word).exists():
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            Path(word).touch()
    while True:
        try:
            context = command.make_context(path[-1], list(words))
        except Exception as error:
            if type(error).__name__ == "Exit":  # --help
                return
            if not hasattr(error, "format_message"):
                raise
            raise Unread(f"{' '.join(path)}: {error.format_message()}") from error
        if not hasattr(command, "resolve_command"):
            return
        rest = [*context._protected_args, *context.args]
        if not rest and command.invoke_without_command:
            return
        if not rest or rest[0] not in command.commands:
            raise Unread(f"{' '.join(path)} has no command {' '.join(rest[:1])}")
        path.append(rest[0])
        command, words = command.commands[rest[0]], rest[1:]


def _read_make(arguments: Sequence[str]) -> None:
    for word in arguments:
        name, is_variable, _ = word.partition("=")
        if name not in (MAKE_VARIABLES if is_variable else TARGETS):
            raise Unread(f"make has no {'variable' if is_variable else 'target'} {name}")


def _read_python(arguments: Sequence[str]) -> None:
    match arguments:
        case ["-m", module, *_]:
            if importlib.util.find_spec(module) is None:
                raise Unread(f"there is no module {module}")
        case [file, *_] if not any(f"/{one}".endswith(f"/{file}") for one in _own_files()):
            raise Unread(f"there is no file {file}")


@functools.cache
def _own_files() -> list[str]:
    # Files of installed packages, such as sympy's add.py, are not the reader's.
    return subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def _read_files(arguments: Sequence[str]) -> bool:
    """Looks for the files of this repository that a command of another program names."""
    ours = [word for word in arguments if re.match(r"(deploy|tools|examples)/", word)]
    for word in ours:
        if not (ROOT / word).exists() and word != "deploy/.env":
            raise Unread(f"there is no file {word}")
    return bool(ours)


def _read_program(program: str) -> bool:
    if not (ROOT / program).exists() and not re.fullmatch(r"clients/\w+/build/client", program):
        raise Unread(f"there is no program {program}")
    return True
