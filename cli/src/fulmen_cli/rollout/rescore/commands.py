"""`fulmen rollout rescore`: scores stored rollouts with another grader and publishes the scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

import typer

from fulmen.client import Client
from fulmen.scores import CONTENT_TYPE, KIND, Scores, ScoresTooLarge, Source, write_scores
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.local.errors import extra_needed
from fulmen_cli.local.record import StackFolder
from fulmen_cli.output import console, print_json, working
from fulmen_cli.rollout.pages import run_name
from fulmen_cli.rollout.rescore.grader import ChosenGrader, GraderOptions, chosen_grader
from fulmen_cli.rollout.rescore.partial import Compared, Partial, opened, partial_path
from fulmen_cli.rollout.rescore.summary import summary_of
from fulmen_cli.rollout.rescore.work import Rescoring
from fulmen_cli.runner_output import prints_beside, quieten_runner
from fulmen_cli.train.publish import Publisher

__all__ = ["register"]

MAX_CONCURRENCY: Final = 256
MOST_PROBLEMS_SHOWN: Final = 200
_GRADER: Final = "What scores, one of them"
_JUDGE: Final = "How a judge scores"
_MODEL: Final = "Which model a judge or grader asks"

_Name = Annotated[str, typer.Option(help="What the scores are published as, such as scores.better.")]
_Grader = Annotated[str | None, typer.Option(rich_help_panel=_GRADER, help="FILE.PY:NAME or PACKAGE.MODULE:NAME.")]
_GraderCommand = Annotated[
    str | None, typer.Option(rich_help_panel=_GRADER, help="A command with its arguments, in one word.")
]
_JudgeModel = Annotated[str | None, typer.Option(rich_help_panel=_GRADER, help="A language model, by its public name.")]
_Folder = Annotated[
    Path, typer.Option(rich_help_panel=_GRADER, help="The grader's files: it runs from a copy of this folder.")
]
_JudgePrompt = Annotated[
    Path | None, typer.Option(rich_help_panel=_JUDGE, help="A file with the prompt; by default the general one.")
]
_JudgeDimension = Annotated[
    list[str] | None, typer.Option(rich_help_panel=_JUDGE, help="What is scored; repeat for more.")
]
_JudgeMin = Annotated[float | None, typer.Option(rich_help_panel=_JUDGE, help="The worst score, by default 0.")]
_JudgeMax = Annotated[float | None, typer.Option(rich_help_panel=_JUDGE, help="The best score, by default 10.")]
_JudgeSamples = Annotated[
    int | None, typer.Option(rich_help_panel=_JUDGE, help="How often it is asked; the mean counts.")
]
_ModelUrl = Annotated[
    str | None,
    typer.Option(rich_help_panel=_MODEL, help="An OpenAI-compatible endpoint; by default the stack's LLM proxy."),
]
_ApiKey = Annotated[
    str | None, typer.Option(rich_help_panel=_MODEL, help="The key for --model-url; by default the caller's token.")
]
_Run = Annotated[str, typer.Option(help="Only rollouts of this training run.")]
_Where = Annotated[str, typer.Option("--filter", help="Only those that it selects, as in `rollout list`.")]
_IncludeFailed = Annotated[
    bool, typer.Option("--include-failed/--no-include-failed", help="Scores what failed rollouts left, too.")
]
_Concurrency = Annotated[int, typer.Option(min=1, max=MAX_CONCURRENCY, help="Outcomes scored at once.")]
_Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that the grader may take for one outcome.")]
_MaxFailed = Annotated[
    int, typer.Option(min=0, help="Publishes nothing if the grader fails on more rollouts than this.")
]
_DryRun = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Scores N rollouts, shows old and new, keeps nothing.")
]
_Restart = Annotated[bool, typer.Option("--restart", help="Scores all anew, instead of going on.")]


def register(rollout: typer.Typer) -> None:
    """Adds the command to the group."""
    remote_command(rollout, "rescore")(rescore)


async def rescore(
    connection: Connection,
    name: _Name = "",
    grader: _Grader = None,
    grader_command: _GraderCommand = None,
    judge_model: _JudgeModel = None,
    folder: _Folder = Path(),
    judge_prompt: _JudgePrompt = None,
    judge_dimension: _JudgeDimension = None,
    judge_min: _JudgeMin = None,
    judge_max: _JudgeMax = None,
    judge_samples: _JudgeSamples = None,
    model_url: _ModelUrl = None,
    api_key: _ApiKey = None,
    run: _Run = "",
    where: _Where = "",
    include_failed: _IncludeFailed = False,
    concurrency: _Concurrency = 8,
    timeout: _Timeout = 120.0,
    max_failed: _MaxFailed = 0,
    dry_run: _DryRun = None,
    restart: _Restart = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Scores stored rollouts with another grader, and publishes the scores as a resource to train on.

    No agent runs: the grader gets each rollout's task and stored outcome, as a runner would call it. A Python grader that
    takes a third parameter finds the whole record, with its trajectory, in `context.stored`. What the rollouts were
    given before stays with them. A rescoring that was stopped goes on where it was, as long as the grader's files and
    the selection are the same.

    Examples:

        fulmen rollout rescore --grader strict.py:grade --run arithmetic-20260314-101500-x7k2-2-grpo --dry-run 5

        fulmen rollout rescore --grader strict.py:grade --run arithmetic-20260314-101500-x7k2-2-grpo --name scores.strict

        fulmen rollout rescore --judge-model gpt-5 --filter 'task_type = "essay"' --name scores.judged --max-failed 3
    """
    if not name and dry_run is None:
        raise CommandFailed("Give the scores a name with --name, or try with --dry-run N.", exit_code=Exit.USAGE)
    judge = _judge_table(judge_model, judge_prompt, judge_dimension, judge_min, judge_max, judge_samples)
    chosen = chosen_grader(GraderOptions(python=grader, command=grader_command, judge=judge, folder=folder.resolve()))
    with extra_needed("Graders are run by the runner"):
        from fulmen_runner import regrade
    quieten_runner()
    states = ("succeeded", "failed") if include_failed else ("succeeded",)
    source = Source(training_run=run_name(run), filter=where, states=states)
    store = f"{connection.targets().store}"
    path = None if dry_run is not None else partial_path(connection.state_dir.resolve(), chosen.identity, source, store)
    bench = _bench(regrade, chosen, connection, model_url, api_key, timeout)
    with opened(path, restart=restart) as partial:
        async with connection.open() as client:
            job = _Job(client=client, regrade=regrade, chosen=chosen, source=source, partial=partial)
            with prints_beside(output):
                results = await job.score(bench, concurrency, dry_run)
            if dry_run is not None:
                _show(results, output)
                return
            _check_failures(results, max_failed)
            version = await job.publish(name, results)
    assert path is not None  # Only a dry run has none.
    path.unlink(missing_ok=True)
    if output is Output.JSON:
        print_json({"scores": version, **summary_of(results).as_dict()})
    else:
        for line in [*summary_of(results).lines(), f"Published {version}."]:
            console().print(line, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One rescoring."""

    client: Client
    regrade: Any
    chosen: ChosenGrader
    source: Source
    partial: Partial

    async def score(self, bench: Any, concurrency: int, limit: int | None) -> list[Compared]:
        """Scores what the source selects and shows how far it is.

        Raises:
            CommandFailed: if the grader cannot be loaded, or nothing is selected.
        """
        known = len(self.partial.done)
        request = rollout_service_pb2.ListRolloutsRequest(
            training_run=self.source.training_run,
            states=[rollout_pb2.RolloutState.Value(f"ROLLOUT_STATE_{each.upper()}") for each in self.source.states],
            filter=self.source.filter,
        )
        done = failed = 0
        with working("scoring") as progress:

            def tell(result: Compared) -> None:
                nonlocal done, failed
                done += 1
                failed += result.score.problem is not None
                progress(f"{known + done} scored ({known} before), {failed} failed")

            try:
                async with self.regrade.open_regrader(self.chosen.spec, bench) as regrader:
                    work = Rescoring(
                        client=self.client,
                        regrade=self.regrade,
                        regrader=regrader,
                        partial=self.partial,
                        concurrency=concurrency,
                        tell=tell,
                    )
                    results = await work.run(request, limit)
            except self.regrade.AgentFailed as error:
                raise CommandFailed(f"The grader cannot be used. {error}") from None
        if not results:
            raise CommandFailed("No rollout with an outcome is selected.", exit_code=Exit.NOT_FOUND)
        return results

    async def publish(self, name: str, results: Sequence[Compared]) -> str:
        """Publishes the scores, unless the latest version is the same; returns its name.

        Raises:
            CommandFailed: if they are too large for one resource.
        """
        scores = Scores(grader=self.chosen.identity, source=self.source, rollouts=tuple(each.score for each in results))
        try:
            content = write_scores(scores)
        except ScoresTooLarge as error:
            raise CommandFailed(str(error)) from None
        return await Publisher(self.client).put(name.removeprefix("resources/"), KIND, CONTENT_TYPE, content)


def _check_failures(results: Sequence[Compared], max_failed: int) -> None:
    """Raises CommandFailed with every rollout that the grader failed on, if those are too many."""
    problems = [
        f"  {each.score.rollout}: {each.score.problem.kind}: {each.score.problem.message.strip()}"
        for each in results
        if each.score.problem is not None
    ]
    if len(problems) <= max_failed:
        return
    shown = problems[:MOST_PROBLEMS_SHOWN]
    if len(problems) > len(shown):
        shown.append(f"  … and {len(problems) - len(shown)} more")
    raise CommandFailed(
        "\n".join(
            [
                f"The grader failed on {len(problems)} of {len(results)} rollouts, and --max-failed is {max_failed}; "
                "nothing was published. What is scored is kept: the same command tries the others again.",
                *shown,
            ]
        )
    )


def _show(results: Sequence[Compared], output: Output) -> None:
    """Shows old and new rewards side by side."""
    if output is Output.JSON:
        rows = [
            {
                "rollout": each.score.rollout,
                "group": each.score.group,
                "old": each.old,
                "new": each.score.final,
                "problem": None if each.score.problem is None else each.score.problem.message,
            }
            for each in results
        ]
        print_json({"rollouts": rows, "summary": summary_of(results).as_dict()})
        return
    screen = console()
    for each in results:
        new = _number(each.score.final) if each.score.problem is None else each.score.problem.message.strip()
        screen.print(
            f"{each.score.rollout}  {each.score.group}  {_number(each.old)} -> {new}", soft_wrap=True, markup=False
        )
    for line in summary_of(results).lines():
        screen.print(line, soft_wrap=True)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"


def _judge_table(
    model: str | None,
    prompt: Path | None,
    dimensions: list[str] | None,
    low: float | None,
    high: float | None,
    samples: int | None,
) -> dict[str, Any] | None:
    """Makes the table `judge` of a `train.toml` of the options."""
    rest = {
        "prompt_file": None if prompt is None else str(prompt.resolve()),
        "dimensions": dimensions or None,
        "min": low,
        "max": high,
        "samples": samples,
    }
    given = {key: value for key, value in rest.items() if value is not None}
    if model is None and given:
        raise CommandFailed("The options of a judge need --judge-model.", exit_code=Exit.USAGE)
    return None if model is None else {"model": model, **given}


def _bench(
    regrade: Any, chosen: ChosenGrader, connection: Connection, url: str | None, key: str | None, timeout: float
) -> Any:
    if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc):
        raise CommandFailed(f"--model-url {url}: write it as https://host/v1.", exit_code=Exit.USAGE)
    if url is None:
        folder = StackFolder(connection.state_dir.resolve())
        record = folder.read() if folder.is_running() else None
        url = record.targets.get("llm_proxy_http", "") if record is not None else ""
        key = key or connection.bearer()
    return regrade.Bench(
        archive=chosen.archive,
        archive_sha256_hex=chosen.identity.bundle_sha256,
        llm_proxy_url=url.rstrip("/").removesuffix("/v1"),
        timeout_s=timeout,
        **({"key": key} if key else {}),
    )
