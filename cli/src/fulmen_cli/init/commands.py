"""`fulmen init` writes a project to start from; `fulmen demo` trains one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import typer

from fulmen_cli.command import local_command, run_at_once
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.init.own_app import NotAnAgent, agent_from
from fulmen_cli.init.template import Agent, Algorithm, Framework, agent_of, project_files
from fulmen_cli.local.record import DEFAULT_STATE_DIR
from fulmen_cli.output import console
from fulmen_cli.stack.commands import down, up
from fulmen_cli.train.commands import train

__all__ = ["register", "write_project"]

MAX_NAME: Final = 32
CONFIG: Final = "train.toml"


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    local_command(app, "init")(init)
    local_command(app, "demo")(demo)


def init(
    folder: Annotated[Path, typer.Argument(help="Where the files are written; created if missing.")] = Path(),
    framework: Annotated[
        Framework | None, typer.Option(help="Framework of the agent; by default `plain`, the openai package.")
    ] = None,
    algorithm: Annotated[
        Algorithm,
        typer.Option(help="Learn from rewards (grpo), imitate conversations (sft), or search for a prompt (apo)."),
    ] = Algorithm.GRPO,
    own_app: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="APP.PY[:NAME]", help="An app in the folder, which becomes the agent; it is not changed."
        ),
    ] = None,
) -> None:
    """Writes an agent, its grader, 20 tasks and a train.toml that explains every line.

    The files work as they are: `fulmen agent check train.toml --fake-model` runs the agent, and `fulmen train train.toml` trains a
    tiny model, made here, until the agent looks orders up instead of guessing. Replace them with yours one by one.

    Nothing is overwritten: if a file exists, all such files are named and none is written.

    Examples:

        fulmen init

        fulmen init support --framework langgraph

        fulmen init --algorithm apo --framework node

        fulmen init --from app.py:answer
    """
    written = write_project(folder, framework=framework, algorithm=algorithm, own_app=own_app)
    screen = console()
    screen.print("\n".join(str(path) for path in written), markup=False, soft_wrap=True)
    where = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    screen.print(f"Try it: {where}fulmen agent check train.toml --fake-model", markup=False, soft_wrap=True)
    if own_app is not None and algorithm is Algorithm.APO:
        screen.print("Let the app request the prompt to use: fulmen.prompt(), or the variable FULMEN_PROMPTS.")
    if own_app is not None:
        screen.print("Then replace tasks/*.jsonl by tasks of your app, and the rule in grader.py.")
    elif algorithm is not Algorithm.APO:
        screen.print("Train it: fulmen up && fulmen train train.toml")


def demo(
    folder: Annotated[
        Path, typer.Argument(help="Where its files and its state are kept; the project of an earlier demo is reused.")
    ] = Path("fulmen-demo"),
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="ALGORITHM.SETTING=VALUE", help="Override a setting of a stage. May be repeated."
        ),
    ] = None,
) -> None:
    """Trains a tiny model through the four services on this machine, without a GPU or a checkout.

    Writes what `fulmen init` writes, starts a stack, trains, and stops the stack. Its agent answers questions about orders with a
    tool. Imitation alone leaves it guessing every other time; from rewards it learns to look orders up.

    Examples:

        fulmen demo

        fulmen demo /tmp/demo --set grpo.steps=5
    """
    screen = console()
    config = folder / CONFIG
    if not config.is_file():
        write_project(folder)
        screen.print(f"Wrote the project {folder}.", markup=False, soft_wrap=True)
    state_dir = folder / DEFAULT_STATE_DIR
    up(state_dir=state_dir)
    try:
        given = {"config": config, "assignments": assignments}
        run_at_once(train, Connection(state_dir=state_dir), given)
    finally:
        down(state_dir=state_dir)
    screen.print(
        f"Look around: cd {folder} && fulmen up, then fulmen run list, fulmen rollout list, fulmen trace ROLLOUT.\n"
        "Your own agent: fulmen init --help",
        markup=False,
        soft_wrap=True,
    )


def write_project(
    folder: Path,
    *,
    framework: Framework | None = None,
    algorithm: Algorithm = Algorithm.GRPO,
    own_app: str | None = None,
) -> list[Path]:
    """Writes the files of a project; returns their paths.

    Raises:
        CommandFailed: if anything is wrong; lists all of it, and nothing is written.
    """
    problems: list[str] = []
    agent = agent_of(framework or Framework.PLAIN)
    if own_app is not None:
        if framework is not None:
            problems.append("give --framework or --from, not both: an existing app is not rewritten")
        agent = _own_agent(own_app, folder, agent, problems)
    if folder.exists() and not folder.is_dir():
        problems.append(f"{folder} is not a folder")
    files = {folder / path: text for path, text in project_files(_name_of(folder), agent, algorithm).items()}
    present = [path for path in files if path.exists() or path.is_symlink()]
    problems += [f"{path} exists" for path in present]
    if problems:
        lines = "\n".join(["Nothing was written.", *(f"  {each}" for each in problems)])
        raise CommandFailed(lines, exit_code=Exit.CONFLICT if len(present) == len(problems) else Exit.USAGE)
    written: list[Path] = []
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text)
        except OSError as error:
            for each in written:
                each.unlink(missing_ok=True)
            raise CommandFailed(f"{path} cannot be written: {error.strerror}. Nothing was kept.") from None
    return written


def _own_agent(target: str, folder: Path, default: Agent, problems: list[str]) -> Agent:
    try:
        return agent_from(target, folder)
    except NotAnAgent as error:
        problems.append(f"--from {target}: {error}")
        return default


def _name_of(folder: Path) -> str:
    """Returns a name for training runs that is like the folder's."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:MAX_NAME].strip("-")
    return name or "agent"
