"""The agent and the input of a check, from a `train.toml` or from the command line alone."""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final

import typer

from fulmen.train_toml.agent import AgentConfig
from fulmen.train_toml.reader import ConfigError
from fulmen.train_toml.train import load_agent_and_data
from fulmen.training.bundle import bundle_summary, pack_bundle
from fulmen_cli.exits import CommandFailed, Exit

__all__ = ["AgentOptions", "InputOptions", "Subject", "subject_of"]

MAX_TIMES: Final = 1000
_PANEL: Final = "Input"
JSON_TYPE: Final = "application/json"
# Runs a program where the person is: without a bundle, a runner starts commands in the attempt's own directory.
_IN_FOLDER: Final = ("sh", "-c", 'cd "$0" && exec "$@"')
TEXT_TYPE: Final = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """The agent: a configuration, a callable or a program."""

    what: Annotated[
        str | None, typer.Argument(metavar="[TRAIN.TOML|FILE.PY:NAME]", help="The configuration, or the callable.")
    ] = None
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[PROGRAM ARGUMENT…]", help="With --command: the program, after --.")
    ] = None
    is_command: Annotated[bool, typer.Option("--command", help="The agent is the program after --.")] = False
    grader: Annotated[
        str | None, typer.Option(help="The grader, FILE.PY:NAME; by default the grader in the train.toml.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """The input of the agent, and how often it runs."""

    task: Annotated[
        int | None,
        typer.Option(min=0, rich_help_panel=_PANEL, help="Line of the train.toml's tasks, from 0; by default 0."),
    ] = None
    text: Annotated[
        str | None, typer.Option("--input", rich_help_panel=_PANEL, help="The input itself: JSON, or text.")
    ] = None
    input_file: Annotated[Path | None, typer.Option(rich_help_panel=_PANEL, help="A file with the input.")] = None
    times: Annotated[int, typer.Option(min=1, max=MAX_TIMES, rich_help_panel=_PANEL, help="Number of runs.")] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An agent with the input of its attempts.

    Attributes:
        title: What it is, for a person.
        agent: How it is started and scored.
        folder: Its files.
        archive: The same, packed; empty for an agent that runs from its folder.
        data: The input.
        content_type: What the input is.
        bundle: A line about what is packed, for a person; empty for an agent that runs from its folder.
    """

    title: str
    agent: AgentConfig
    folder: Path
    archive: bytes = field(repr=False)
    data: bytes
    content_type: str
    bundle: str = ""

    @property
    def archive_sha256_hex(self) -> str:
        """The digest of the packed files."""
        return hashlib.sha256(self.archive).hexdigest()


def subject_of(options: AgentOptions, given: InputOptions) -> Subject:
    """Reads the agent and its input.

    Raises:
        CommandFailed: if an option is missing or contradicts another, or a file does not exist.
        ConfigError: if the configuration is not valid.
    """
    what, words, grader = options.what, options.words or [], options.grader
    command = [*([what] if what else []), *words] if options.is_command else []
    if sum(each is not None for each in (given.task, given.text, given.input_file)) > 1:
        raise _wrong("Give only one of --task, --input and --input-file.")
    if command:
        agent = AgentConfig(command=(*_IN_FOLDER, _escaped(str(Path.cwd())), *command), grader=grader or "")
        return _direct(agent, " ".join(command), given)
    if words or what is None or options.is_command:
        raise _wrong(
            "Name the agent to check: a train.toml, a Python callable as file.py:name, or --command -- PROGRAM …."
        )
    if ":" in what and not what.endswith(".toml"):
        module = what.partition(":")[0]
        if module.endswith(".py") and not Path(module).is_file():
            raise CommandFailed(f"File {module} does not exist.", exit_code=Exit.NOT_FOUND)
        return _direct(AgentConfig(python=what, grader=grader or ""), what, given)
    if what.endswith(".py"):
        raise _wrong(f"Name the function: {what}:NAME{_functions(Path(what))}.")
    return _configured(Path(what), given, grader=grader)


def _functions(path: Path) -> str:
    """Lists the public functions of a file; empty if it cannot be parsed."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return ""
    names = [each.name for each in body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
    public = [name for name in names if not name.startswith("_")]
    return f", of {', '.join(public)}" if public else ""


def _configured(path: Path, given: InputOptions, *, grader: str | None) -> Subject:
    agent, tasks = load_agent_and_data(path)
    folder = path.resolve().parent
    if grader:
        agent = AgentConfig(**{name: getattr(agent, name) for name in _KEPT}, grader=grader)
    files = tuple(each for each in (tasks.train, tasks.validation, tasks.demonstrations) if each)
    in_folder = bool(agent.python) and not (agent.requirements or agent.venv)
    bundle = None if in_folder else pack_bundle(folder, data_files=files, agent=agent)
    if given.text is not None or given.input_file is not None:
        data, content_type = _input(given)
    else:
        data, content_type = _task(tasks.train or tasks.validation, given.task or 0), JSON_TYPE
    title = agent.python or agent.command or (agent.container.image if agent.container else "a Job")
    title = title if isinstance(title, str) else " ".join(title)
    return Subject(
        title=f"{title} of {path}",
        agent=agent,
        folder=folder,
        archive=b"" if bundle is None else bundle.content,
        bundle="" if bundle is None else bundle_summary(bundle),
        data=data,
        content_type=content_type,
    )


_KEPT: Final = (
    "python", "isolation", "command", "container", "job", "max_output_bytes", "limits", "environment", "secrets", "include",
    "requirements", "venv",
)  # fmt: skip


def _direct(agent: AgentConfig, title: str, given: InputOptions) -> Subject:
    if given.task is not None:
        raise _wrong("--task needs a train.toml: give --input or --input-file for this agent.")
    if given.text is None and given.input_file is None:
        raise _wrong("""Give the agent an input: --input '{"question": "12+34="}' or --input-file FILE.""")
    data, content_type = _input(given)
    folder = Path.cwd()
    # Run where the person is, not from a copy of what may be a home directory.
    return Subject(title=title, agent=agent, folder=folder, archive=b"", data=data, content_type=content_type)


def _escaped(text: str) -> str:
    """Escapes a text for use as a template."""
    return text.replace("{", "{{").replace("}", "}}")


def _input(given: InputOptions) -> tuple[bytes, str]:
    if given.input_file is not None:
        try:
            data = given.input_file.read_bytes()
        except OSError as error:
            raise CommandFailed(
                f"{given.input_file} cannot be read: {error.strerror}", exit_code=Exit.NOT_FOUND
            ) from None
    else:
        data = (given.text or "").encode()
    try:
        json.loads(data)
    except ValueError as error:
        if data.lstrip().startswith((b"{", b"[")):
            sys.stderr.write(f"note: the input looks like JSON but is malformed ({error}); it is passed as text.\n")
        return data, TEXT_TYPE
    return data, JSON_TYPE


def _task(path: Path | None, number: int) -> bytes:
    if path is None:
        raise _wrong("The configuration names no tasks: give --input or --input-file.")
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    if not 0 <= number < len(lines):
        last = f"0 to {len(lines) - 1}" if lines else "none"
        raise CommandFailed(f"{path} has no task {number}: there are {last}.", exit_code=Exit.NOT_FOUND)
    try:
        json.loads(lines[number])
    except ValueError as error:
        raise ConfigError(f"Task {number} of {path} is not JSON.", [str(error)]) from None
    return lines[number]


def _wrong(message: str) -> CommandFailed:
    return CommandFailed(message, exit_code=Exit.USAGE)
