"""Generates docs/cli.md from the command tree, with the texts of `--help`.

python tools/cli_reference.py            writes it
python tools/cli_reference.py --check    exits with 1 if it is not current
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from fulmen_cli.main import app

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"
INTRODUCTION = """\
# The command line

Generated from the commands' help by `tools/cli_reference.py`; do not edit.

Every command that prints data has `--output table|json`; JSON goes to standard output, messages and progress to standard
error. Every command that talks to services also has the options of [the last section](#where-to-connect).

| exit status | meaning |
|---|---|
| 0 | done |
| 1 | failed; the message has a hint |
| 2 | invalid options or input |
| 3 | not found |
| 4 | conflict |
| 130 | interrupted by Ctrl-C or SIGTERM |
"""
CONNECTION = ("--state-dir", "--store-target", "--algorithm-target", "--llm-proxy-target", "--token")


def page() -> str:
    """Returns the whole page."""
    root = typer.main.get_command(app)
    parts = [INTRODUCTION]
    shared: dict[str, Any] = {}
    for path, command in commands(root, ()):
        if getattr(command, "commands", None):
            parts.append(f"## fulmen {' '.join(path)}\n\n{_text(command)}\n")
            continue
        level = "##" if len(path) == 1 else "###"
        options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
        remote = [each for each in options if each.opts[0] in CONNECTION]
        if len(remote) == len(CONNECTION):
            shared = {each.opts[0]: each for each in remote}
            options = [each for each in options if each not in remote]
        arguments = [each for each in command.params if each.param_type_name == "argument"]
        usage = " ".join(["fulmen", *path, *(_argument(each) for each in arguments)])
        parts.append(f"{level} fulmen {' '.join(path)}\n\n`{usage}`\n\n{_text(command)}\n{_table(arguments, options)}")
    parts.append(f"## Where to connect\n\n{_table([], [shared[name] for name in CONNECTION if name in shared])}")
    return "\n".join(part.rstrip() + "\n" for part in parts)


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields every group and command except the root, in the order of the help; commands precede groups."""
    children = getattr(command, "commands", {})
    for name, child in sorted(children.items(), key=lambda item: bool(getattr(item[1], "commands", None))):
        if not child.hidden:
            yield (*path, name), child
            yield from commands(child, (*path, name))


def _text(command: Any) -> str:
    """Returns the help as Markdown; its indented examples become code."""
    return inspect.cleandoc(command.help or "").replace("\f", "")


def _argument(argument: Any) -> str:
    name = (argument.metavar or argument.name or "").strip("[]{}")
    return name.upper() if argument.required else f"[{name.upper()}]"


def _table(arguments: list[Any], options: list[Any]) -> str:
    rows = [(_argument(each), getattr(each, "help", "") or "") for each in arguments]
    for option in options:
        names = ", ".join([*option.opts, *option.secondary_opts])
        default = option.default if isinstance(option.default, str | int | float) else None
        more = f" Default: {default}." if default not in (None, False, "") else ""
        more += f" Environment: {option.envvar}." if option.envvar else ""
        rows.append((names, f"{option.help or ''}{more}"))
    if not rows:
        return ""
    lines = [f"| `{name}` | {_cell(text)} |" for name, text in rows]
    return "\n".join(["", "| option | |", "|---|---|", *lines, ""])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Writes or checks the page."""
    text = page()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        sys.exit("docs/cli.md is not current: run `python tools/cli_reference.py`.")


if __name__ == "__main__":
    main()
