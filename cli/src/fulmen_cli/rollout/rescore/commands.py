"""`fulmen rollout rescore`: scores stored rollouts with another grader and publishes the scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

import typer

from fulmen.rpc.services import Services
from fulmen.scores import CONTENT_TYPE, KIND, Scores, ScoresTooLarge, Source, write_scores
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from fulmen.training.publish import Publisher
from fulmen_cli.command import Output, OutputOption, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.local.errors import extra_needed
from fulmen_cli.local.record import StackFolder
from fulmen_cli.names import run_name
from fulmen_cli.output import console, print_json, prints_beside, quieten_runner, working
from fulmen_cli.rollout.rescore.grader import ChosenGrader, GraderOptions, JudgeOptions, chosen_grader
from fulmen_cli.rollout.rescore.partial import Compared, Partial, opened, partial_path
from fulmen_cli.rollout.rescore.rescoring import Rescoring
from fulmen_cli.rollout.rescore.scores import summary_of

if TYPE_CHECKING:
    from fulmen_runner.regrade import Bench

__all__ = ["register"]

MAX_CONCURRENCY: Final = 256
MAX_PROBLEMS_SHOWN: Final = 200
_MODEL: Final = "Model of the judge or grader"


def register(rollout: typer.Typer) -> None:
    """Adds the command to the group."""
    remote_command(rollout, "rescore")(rescore)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The model that a judge or grader calls."""

    model_url: Annotated[
        str | None,
        typer.Option(rich_help_panel=_MODEL, help="An OpenAI-compatible endpoint; by default the stack's LLM proxy."),
    ] = None
    api_key: Annotated[
        str | None, typer.Option(rich_help_panel=_MODEL, help="The key for --model-url; by default the token.")
    ] = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionOptions:
    """The rollouts to score."""

    run: Annotated[str, typer.Option(help="Only rollouts of this training run.")] = ""
    where: Annotated[str, typer.Option("--filter", help="Only rollouts that match, as in `rollout list`.")] = ""
    include_failed: Annotated[
        bool, typer.Option("--include-failed/--no-include-failed", help="Also score outcomes of failed rollouts.")
    ] = False
    dry_run: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Score N rollouts and show old and new rewards; store nothing."),
    ] = None

    async def source(self, connection: Connection, client: Services) -> Source:
        """Returns the selection, as published with the scores."""
        states = ("succeeded", "failed") if self.include_failed else ("succeeded",)
        run = await run_name(self.run, connection, client)
        return Source(training_run=run, filter=self.where, states=states)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """How many outcomes are scored concurrently, for how long, and how many may fail."""

    concurrency: Annotated[int, typer.Option(min=1, max=MAX_CONCURRENCY, help="Outcomes scored concurrently.")] = 8
    timeout: Annotated[float, typer.Option(min=0.1, help="Timeout of the grader for one outcome, seconds.")] = 120.0
    max_failed: Annotated[
        int, typer.Option(min=0, help="Publish nothing if the grader fails on more rollouts than this.")
    ] = 0
    restart: Annotated[bool, typer.Option("--restart", help="Score everything again instead of resuming.")] = False


async def rescore(
    connection: Connection,
    grader: GraderOptions,
    judge: JudgeOptions,
    model: ModelOptions,
    selection: SelectionOptions,
    limits: LimitOptions,
    name: Annotated[str, typer.Option(help="Resource to publish the scores as, such as scores.better.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Scores stored rollouts with another grader, and publishes the scores as a resource to train on.

    No agent runs: the grader gets each rollout's task and stored outcome, as in a runner. A Python grader that takes
    a third parameter finds the stored attempt, with its trajectory, in `context.stored`. The original rewards are
    kept. An interrupted rescoring resumes where it stopped, as long as the grader's files and the selection are
    unchanged.

    Examples:

        fulmen rollout rescore --grader strict.py:grade --run arithmetic-20260314-101500-x7k2-2-grpo --dry-run 5

        fulmen rollout rescore --grader strict.py:grade --run arithmetic-20260314-101500-x7k2-2-grpo --name scores.strict

        fulmen rollout rescore --judge-model gpt-5 --filter 'task_type = "essay"' --name scores.judged --max-failed 3
    """
    if not name and selection.dry_run is None:
        raise CommandFailed("Name the scores with --name, or try the grader with --dry-run N.", exit_code=Exit.USAGE)
    chosen = chosen_grader(grader, judge)
    with extra_needed("Graders are run by the runner"):
        import fulmen_runner.regrade  # noqa: F401  # Everything below needs it.
    quieten_runner()
    path = None
    bench = _bench(chosen, connection, model, limits.timeout)
    async with connection.open() as client:
        source = await selection.source(connection, client)
        if selection.dry_run is None:
            store = connection.targets().store
            path = partial_path(connection.state_dir.resolve(), chosen.identity, source, store)
        with opened(path, restart=limits.restart) as partial:
            job = _Job(client=client, chosen=chosen, source=source, partial=partial)
            with prints_beside(output):
                results = await job.score(bench, limits.concurrency, selection.dry_run)
            if selection.dry_run is not None:
                _show(results, output)
                return
            _check_failures(results, limits.max_failed)
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

    client: Services
    chosen: ChosenGrader
    source: Source
    partial: Partial

    async def score(self, bench: Bench, concurrency: int, limit: int | None) -> list[Compared]:
        """Scores the selected rollouts and shows progress.

        Raises:
            CommandFailed: if the grader cannot be loaded, or nothing is selected.
        """
        from fulmen_runner.regrade import AgentFailed, open_regrader

        known = len(self.partial.done)
        request = rollout_service_pb2.ListRolloutsRequest(
            training_run=self.source.training_run,
            states=[rollout_pb2.RolloutState.Value(f"ROLLOUT_STATE_{each.upper()}") for each in self.source.states],
            filter=self.source.filter,
        )
        done = failed = 0
        with working("scoring") as progress:

            def show_progress(result: Compared) -> None:
                nonlocal done, failed
                done += 1
                failed += result.score.problem is not None
                progress(f"{known + done} scored ({known} before), {failed} failed")

            try:
                async with open_regrader(self.chosen.spec, bench) as regrader:
                    work = Rescoring(
                        client=self.client,
                        regrader=regrader,
                        partial=self.partial,
                        concurrency=concurrency,
                        on_result=show_progress,
                    )
                    results = await work.run(request, limit)
            except AgentFailed as error:
                raise CommandFailed(f"The grader cannot be used. {error}") from None
        if not results:
            raise CommandFailed("No rollout with an outcome is selected.", exit_code=Exit.NOT_FOUND)
        return results

    async def publish(self, name: str, results: Sequence[Compared]) -> str:
        """Publishes the scores unless the latest version is identical; returns its name.

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
    """Raises CommandFailed with all problems, if there are too many."""
    problems = [
        f"  {each.score.rollout}: {each.score.problem.kind}: {each.score.problem.message.strip()}"
        for each in results
        if each.score.problem is not None
    ]
    if len(problems) <= max_failed:
        return
    shown = problems[:MAX_PROBLEMS_SHOWN]
    if len(problems) > len(shown):
        shown.append(f"  … and {len(problems) - len(shown)} more")
    raise CommandFailed(
        "\n".join(
            [
                f"The grader failed on {len(problems)} of {len(results)} rollouts, and --max-failed is {max_failed}; "
                "nothing was published. Finished scores are kept: the same command tries the others again.",
                *shown,
            ]
        )
    )


def _show(results: Sequence[Compared], output: Output) -> None:
    """Prints old and new rewards side by side."""
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


def _bench(chosen: ChosenGrader, connection: Connection, model: ModelOptions, timeout: float) -> Bench:
    from fulmen_runner.regrade import Bench

    url, key = model.model_url, model.api_key
    if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc):
        raise CommandFailed(f"--model-url {url}: write it as https://host/v1.", exit_code=Exit.USAGE)
    if url is None:
        folder = StackFolder(connection.state_dir.resolve())
        record = folder.read() if folder.is_running() else None
        url = record.targets.get("llm_proxy_http", "") if record is not None else ""
        key = key or connection.bearer()
    return Bench(
        archive=chosen.archive,
        archive_sha256_hex=chosen.identity.bundle_sha256,
        llm_proxy_url=url.rstrip("/").removesuffix("/v1"),
        timeout_s=timeout,
        **({"key": key} if key else {}),
    )
