"""The grader of a rescoring: read from options, validated like `[agent]` of a `train.toml`, packed with its files."""

from __future__ import annotations

import hashlib
import json
import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from fulmen.runner.v1 import agent_spec_pb2
from fulmen.scores import GraderIdentity
from fulmen.train_toml.agent import AgentConfig, agent_spec, read_agent
from fulmen.train_toml.reader import ConfigError, TableReader
from fulmen.training.bundle import pack_bundle
from fulmen_cli.exits import CommandFailed, Exit

__all__ = ["ChosenGrader", "GraderOptions", "JudgeOptions", "chosen_grader"]


_GRADER: Final = "Grader (one of them)"
_JUDGE: Final = "Judge"


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderOptions:
    """The grader: one of a callable, a command and a judge."""

    grader: Annotated[
        str | None, typer.Option(rich_help_panel=_GRADER, help="FILE.PY:NAME or PACKAGE.MODULE:NAME.")
    ] = None
    grader_command: Annotated[
        str | None, typer.Option(rich_help_panel=_GRADER, help="A command with its arguments, quoted as one word.")
    ] = None
    judge_model: Annotated[
        str | None, typer.Option(rich_help_panel=_GRADER, help="A language model, by its public name.")
    ] = None
    folder: Annotated[
        Path, typer.Option(rich_help_panel=_GRADER, help="The grader's files; it runs in a copy of this directory.")
    ] = Path()


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """How a judge scores."""

    judge_prompt: Annotated[
        Path | None, typer.Option(rich_help_panel=_JUDGE, help="File with the prompt; by default a general one.")
    ] = None
    judge_dimension: Annotated[
        list[str] | None, typer.Option(rich_help_panel=_JUDGE, help="Dimension to score. May be repeated.")
    ] = None
    judge_min: Annotated[float | None, typer.Option(rich_help_panel=_JUDGE, help="Lowest score, by default 0.")] = None
    judge_max: Annotated[float | None, typer.Option(rich_help_panel=_JUDGE, help="Highest score, by default 10.")] = (
        None
    )
    judge_samples: Annotated[
        int | None, typer.Option(rich_help_panel=_JUDGE, help="Answers per outcome; their mean is the score.")
    ] = None

    def table(self, model: str | None) -> dict[str, Any] | None:
        """Returns the table `judge` of a `train.toml`; None without a model.

        Raises:
            CommandFailed: if options of a judge are given without a model.
        """
        options = {
            "prompt_file": None if self.judge_prompt is None else str(self.judge_prompt.resolve()),
            "dimensions": self.judge_dimension or None,
            "min": self.judge_min,
            "max": self.judge_max,
            "samples": self.judge_samples,
        }
        given = {key: value for key, value in options.items() if value is not None}
        if model is None and given:
            raise CommandFailed("The options of a judge need --judge-model.", exit_code=Exit.USAGE)
        return None if model is None else {"model": model, **given}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenGrader:
    """A grader and its packed files; a judge has none."""

    identity: GraderIdentity
    spec: agent_spec_pb2.Grader
    archive: bytes = field(repr=False)


def chosen_grader(options: GraderOptions, judge: JudgeOptions) -> ChosenGrader:
    """Checks and packs the grader of the options.

    Raises:
        CommandFailed: if none or several are named.
        ConfigError: with everything that is wrong with it.
    """
    table = judge.table(options.judge_model)
    if sum(each is not None for each in (options.grader, options.grader_command, table)) != 1:
        raise CommandFailed(
            "Give one grader: --grader FILE.PY:NAME, --grader-command 'PROGRAM …' or --judge-model NAME.",
            exit_code=Exit.USAGE,
        )
    folder = options.folder.resolve()
    agent = _checked(options, table, folder)
    spec = agent_spec(agent, "").grader
    if agent.judge is not None:
        entry = json.dumps({key: value for key, value in asdict(agent.judge).items() if value}, sort_keys=True)
        return ChosenGrader(identity=GraderIdentity(kind="judge", entry=entry), spec=spec, archive=b"")
    archive = pack_bundle(folder, agent=agent).content
    identity = GraderIdentity(
        kind="python" if agent.grader else "command",
        entry=agent.grader or shlex.join(agent.grader_command),
        bundle_sha256=hashlib.sha256(archive).hexdigest(),
    )
    return ChosenGrader(identity=identity, spec=spec, archive=archive)


def _checked(options: GraderOptions, judge: dict[str, Any] | None, folder: Path) -> AgentConfig:
    try:
        words = None if options.grader_command is None else shlex.split(options.grader_command)
    except ValueError as error:
        raise ConfigError("The grader is not valid.", [f"--grader-command: {error}"]) from None
    graders = {"grader": options.grader, "grader_command": words, "judge": judge}
    # No agent runs; the table must name one.
    table = {"command": ["false"], **{key: value for key, value in graders.items() if value is not None}}
    problems: list[str] = []
    agent = read_agent(TableReader(table, "", problems), folder)
    if problems:
        raise ConfigError("The grader is not valid.", problems)
    return agent
