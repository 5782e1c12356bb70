"""Which grader scores: read from options, checked like `[agent]` of a `train.toml`, packed with its files."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fulmen.agent_config import AgentConfig, agent_spec, read_agent
from fulmen.config_reader import ConfigError, TableReader
from fulmen.runner.v1 import agent_spec_pb2
from fulmen.scores import GraderIdentity
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.train.bundle import pack_bundle

__all__ = ["ChosenGrader", "GraderOptions", "chosen_grader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderOptions:
    """What the command line says about the grader; one of `python`, `command` and `judge`.

    Attributes:
        python: `file.py:name` or `package.module:name`.
        command: A command line, split as a shell does.
        judge: The table `judge` of a `train.toml`; None if there is no judge.
        folder: The grader's files.
    """

    python: str | None
    command: str | None
    judge: dict[str, Any] | None
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenGrader:
    """A grader and its files, packed; a judge has none."""

    identity: GraderIdentity
    spec: agent_spec_pb2.Grader
    archive: bytes = field(repr=False)


def chosen_grader(options: GraderOptions) -> ChosenGrader:
    """Checks and packs what was asked for.

    Raises:
        CommandFailed: if none or several are named.
        ConfigError: with everything that is wrong with it.
    """
    if sum(each is not None for each in (options.python, options.command, options.judge)) != 1:
        raise CommandFailed(
            "Name what scores: --grader FILE.PY:NAME, --grader-command 'PROGRAM …' or --judge-model NAME, one of them.",
            exit_code=Exit.USAGE,
        )
    agent = _checked(options)
    spec = agent_spec(agent, "").grader
    if agent.judge is not None:
        entry = json.dumps({key: value for key, value in asdict(agent.judge).items() if value}, sort_keys=True)
        return ChosenGrader(identity=GraderIdentity(kind="judge", entry=entry), spec=spec, archive=b"")
    archive = pack_bundle(options.folder).content
    identity = GraderIdentity(
        kind="python" if agent.grader else "command",
        entry=agent.grader or shlex.join(agent.grader_command),
        bundle_sha256=hashlib.sha256(archive).hexdigest(),
    )
    return ChosenGrader(identity=identity, spec=spec, archive=archive)


def _checked(options: GraderOptions) -> AgentConfig:
    try:
        words = None if options.command is None else shlex.split(options.command)
    except ValueError as error:
        raise ConfigError("The grader is not valid.", [f"--grader-command: {error}"]) from None
    graders = {"grader": options.python, "grader_command": words, "judge": options.judge}
    # No agent runs; the table must name one.
    table = {"command": ["false"], **{key: value for key, value in graders.items() if value is not None}}
    problems: list[str] = []
    agent = read_agent(TableReader(table, "", problems), options.folder)
    if problems:
        raise ConfigError("The grader is not valid.", problems)
    return agent
