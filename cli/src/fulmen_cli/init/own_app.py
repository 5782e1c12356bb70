"""Finds out how an app that exists is started, from its file."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

from fulmen_cli.init.template import Agent

__all__ = ["NotAnAgent", "agent_from"]

# What people call the function that does the work, the most usual first.
USUAL_NAMES: Final = ("solve", "run", "agent", "answer", "main")
_MODEL: Final = re.compile(r"""\bmodel["']?\s*[=:]\s*["']([^"'\n]+)["']""", re.I)
_POLICY_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_PROGRAMS: Final = {".js": "node", ".mjs": "node", ".cjs": "node", ".sh": "bash"}


class NotAnAgent(Exception):
    """Raised if an app has nothing that can be called with a task; the message lists its functions."""


def agent_from(target: str, folder: Path) -> Agent:
    """Returns the agent of an app.

    Args:
        target: `file.py`, `file.py:name`, or a program of Node or bash.
        folder: The project's folder, which has the file.

    Raises:
        NotAnAgent: if the file does not exist there, cannot be read, or has nothing to call.
    """
    name, _, function = target.partition(":")
    path = (folder / name).resolve()
    if not path.is_file():
        raise NotAnAgent(f"there is no file {path}")
    if not path.is_relative_to(folder.resolve()):
        raise NotAnAgent(f"{path} is outside of {folder.resolve()}: run `fulmen init` in the app's folder")
    file = path.relative_to(folder.resolve()).as_posix()
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise NotAnAgent(f"{path} is not UTF-8") from None
    model = next((each for each in _MODEL.findall(text) if _POLICY_NAME.fullmatch(each)), "assistant")
    if path.suffix in _PROGRAMS:
        return _program([_PROGRAMS[path.suffix], file], model, file)
    if path.suffix != ".py":
        known = ", ".join((".py", *_PROGRAMS))
        raise NotAnAgent(f"{file}: an app is a file that ends with {known}; start others by `command` in train.toml")
    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise NotAnAgent(f"{file} is not valid Python: line {error.lineno}: {error.msg}") from None
    functions = [
        each.name
        for each in body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        and not each.name.startswith("_")
        and _takes_one(each)
    ]
    if function and function not in functions:
        raise NotAnAgent(f"{file} has no function {function!r} of one argument; it has {_listed(functions)}")
    chosen = function or next((each for each in USUAL_NAMES if each in functions), "")
    if not chosen and len(functions) == 1:
        chosen = functions[0]
    if chosen:
        return Agent(
            entry=f'python = "{file}:{chosen}"',
            comment="A function of a file: called with each task, returns the outcome",
            model=model,
            file=file,
        )
    if not functions and any(isinstance(each, ast.If) and "__name__" in ast.unparse(each.test) for each in body):
        return _program(["python", file], model, file)
    raise NotAnAgent(f"{file}: name the function that gets a task, as {file}:NAME; it has {_listed(functions)}")


def _program(words: list[str], model: str, file: str) -> Agent:
    quoted = ", ".join(f'"{word}"' for word in words)
    return Agent(
        entry=f"command = [{quoted}]",
        comment="A program: reads a task from standard input, prints the outcome",
        model=model,
        file=file,
    )


def _takes_one(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns whether a function can be called with one argument."""
    given = function.args
    positional = len(given.posonlyargs) + len(given.args)
    needed = positional - len(given.defaults)
    has_needed_keywords = any(each is None for each in given.kw_defaults)
    return not has_needed_keywords and needed <= 1 and (positional >= 1 or given.vararg is not None)


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"
