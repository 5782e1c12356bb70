"""`fulmen annotations`: adds, lists and deletes scores by people, shows how far they agree, and publishes them as
rewards."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from enum import StrEnum
from typing import Annotated, Final

import typer

from fulmen.agent import RewardKey
from fulmen.errors import AnnotationExists, RolloutNotFound
from fulmen.rpc.services import Services
from fulmen.scores import CONTENT_TYPE, KIND, GraderIdentity, RolloutScore, Scores, ScoresTooLarge, Source, write_scores
from fulmen.store.v1 import annotation_service_pb2 as pb
from fulmen.store.v1 import rollout_pb2, rollout_service_pb2
from fulmen.training.publish import Publisher
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.names import rollout_name, short_name
from fulmen_cli.output import as_dict, console, enum_word, print_json, print_rows, when
from fulmen_cli.project.commands import project_name

__all__ = ["register"]

PAGE_SIZE: Final = 1000
CALLS_AT_ONCE: Final = 16
PEOPLE: Final = "people"

ProjectOption = Annotated[str, typer.Option(help="Only this project; by default the token's.")]
DimensionOption = Annotated[str, typer.Option("--dimension", "-d", help="What is scored.")]


class Level(StrEnum):
    """What values mean."""

    NOMINAL = "nominal"
    ORDINAL = "ordinal"
    INTERVAL = "interval"


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = new_group("Scores that people give to rollouts, and how far these people agree.")
    remote_command(group, "add")(add)
    remote_command(group, "list")(list_annotations)
    remote_command(group, "delete")(delete)
    remote_command(group, "agreement")(agreement)
    remote_command(group, "publish")(publish)
    app.add_typer(group, name="annotations")


async def add(
    connection: Connection,
    rollout: Annotated[str, typer.Argument(help="The rollout.")],
    value: Annotated[float, typer.Argument(help="The score, a number.")],
    dimension: DimensionOption = "reward",
    comment: Annotated[str, typer.Option(help="Why, at most 4096 characters.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Scores a rollout; replaces your earlier score. The author is the subject of your token.

    Example:

        fulmen annotations add 0197a1b2 4 --dimension helpful --comment "right, but long"
    """
    async with connection.open() as client:
        name = await rollout_name(rollout, connection, client)
        given = pb.Annotation(rollout=name, dimension=dimension, value=value, comment=comment)
        try:
            added = (await client.annotations.CreateAnnotation(pb.CreateAnnotationRequest(annotation=given))).annotation
        except AnnotationExists as error:
            given.name = str(error.metadata["annotation"])
            added = (await client.annotations.UpdateAnnotation(pb.UpdateAnnotationRequest(annotation=given))).annotation
    if output is Output.JSON:
        print_json(as_dict(added))
    else:
        text = f"{added.author} gives {short_name(added.rollout)} {added.value:g} for {added.dimension}."
        console().print(text, markup=False, soft_wrap=True)


async def list_annotations(
    connection: Connection,
    project: ProjectOption = "",
    rollout: Annotated[str, typer.Option(help="Only this rollout.")] = "",
    author: Annotated[str, typer.Option(help="Only by this author.")] = "",
    dimension: Annotated[str, typer.Option("--dimension", "-d", help="Only of this dimension.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Maximum number, newest first.")] = 100,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists scores, newest first.

    Example:

        fulmen annotations list --author ann --dimension helpful
    """
    request = pb.ListAnnotationsRequest(
        project=project_name(project) if project else "", author=author, dimension=dimension
    )
    found: list[pb.Annotation] = []
    async with connection.open() as client:
        request.rollout = await rollout_name(rollout, connection, client) if rollout else ""
        async for each in _all(client, request):
            found.append(each)
            if len(found) == limit:
                break
    rows = [
        (
            when(each.update_time),
            short_name(each.rollout),
            each.author,
            each.dimension,
            f"{each.value:g}",
            each.comment,
            each.name.rpartition("/")[2],
        )
        for each in found
    ]
    columns = ("when (UTC)", "rollout", "author", "dimension", "value", "comment", "id")
    empty = "No annotations."
    print_rows(output, columns, rows, messages=found, empty=empty, right=("value",), spare=("id", "comment"))


async def delete(
    connection: Connection,
    annotation: Annotated[str, typer.Argument(help="Id of the annotation in the token's project, or its name.")],
) -> None:
    """Deletes a score: yours, or with an admin's token anyone's.

    Example:

        fulmen annotations delete 0197a1b2-5d2e-7c31-9f00-1c2d3e4f5a6b
    """
    name = annotation if "/" in annotation else f"{connection.project}/annotations/{annotation}"
    async with connection.open() as client:
        await client.annotations.DeleteAnnotation(pb.DeleteAnnotationRequest(name=name))
    console().print(f"Deleted {name}.", markup=False, soft_wrap=True)


async def agreement(
    connection: Connection,
    dimension: DimensionOption = "reward",
    level: Annotated[
        Level, typer.Option(help="What values mean: names, ranks, or numbers whose differences count.")
    ] = Level.INTERVAL,
    project: ProjectOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows how far the people who score a dimension agree: 1 is full agreement, 0 is agreement by chance.

    Krippendorff's alpha is over all of them, Cohen's kappa for each pair.

    Example:

        fulmen annotations agreement --dimension helpful --level ordinal
    """
    request = pb.GetAgreementRequest(
        project=project_name(project) if project else "",
        dimension=dimension,
        level=pb.MeasurementLevel.Value(f"MEASUREMENT_LEVEL_{level.upper()}"),
    )
    async with connection.open() as client:
        found = await client.annotations.GetAgreement(request)
    if output is Output.JSON:
        print_json(as_dict(found))
        return
    alpha = f"{found.alpha:.3f}" if found.HasField("alpha") else "none"
    screen = console()
    screen.print(
        f"Krippendorff's alpha of {dimension}: {alpha}, over {found.rollout_count} rollouts that several people scored.",
        markup=False,
        soft_wrap=True,
    )
    for each in found.authors:
        screen.print(f"  {each.author}: {each.annotation_count} scores, mean {each.mean:.3g}", markup=False)
    rows = [
        (
            pair.author,
            pair.other_author,
            str(pair.rollout_count),
            f"{pair.equal_share:.0%}",
            f"{pair.kappa:.3f}" if pair.HasField("kappa") else "",
        )
        for pair in found.pairs
    ]
    columns = ("author", "and", "rollouts", "equal", "kappa")
    right = ("rollouts", "equal", "kappa")
    print_rows(
        output, columns, rows, messages=list(found.pairs), empty="No rollout was scored by two people.", right=right
    )


async def publish(
    connection: Connection,
    name: Annotated[str, typer.Argument(help="Name of the scores, such as scores.people.")],
    dimension: DimensionOption = "reward",
    run: Annotated[str, typer.Option(help="Only of rollouts of this training run, by its full name.")] = "",
) -> None:
    """Publishes the mean score of each rollout as rewards, which `replay` trains on.

    The result is a resource of kind `scores`, as `fulmen rollout rescore` publishes it.

    Example:

        fulmen annotations publish scores.people --dimension helpful
    """
    async with connection.open() as client:
        given: dict[str, list[float]] = defaultdict(list)
        async for each in _all(client, pb.ListAnnotationsRequest(dimension=dimension)):
            given[each.rollout].append(each.value)
        means = {rollout: sum(values) / len(values) for rollout, values in given.items()}
        scored = [each for each in await _scored(client, means) if run in ("", each.training_run)]
        if not scored:
            text = f"No rollout that has ended has a score of {dimension!r}: add some with `fulmen annotations add`."
            raise CommandFailed(text, exit_code=Exit.NOT_FOUND)
        scores = Scores(
            grader=GraderIdentity(kind=PEOPLE, entry=dimension),
            source=Source(training_run=run, states=("succeeded", "failed")),
            rollouts=tuple(scored),
        )
        try:
            content = write_scores(scores)
        except ScoresTooLarge as error:
            raise CommandFailed(str(error)) from None
        version = await Publisher(client).put(name.removeprefix("resources/"), KIND, CONTENT_TYPE, content)
    console().print(f"{len(scored)} rollouts. Published {version}.", markup=False, soft_wrap=True)


async def _all(client: Services, request: pb.ListAnnotationsRequest) -> AsyncIterator[pb.Annotation]:
    request.page_size = PAGE_SIZE
    while True:
        page = await client.annotations.ListAnnotations(request)
        for each in page.annotations:
            yield each
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


async def _scored(client: Services, means: dict[str, float]) -> Sequence[RolloutScore]:
    """Returns the scores of those rollouts that have an attempt; one that was deleted meanwhile is left out."""
    slots = asyncio.Semaphore(CALLS_AT_ONCE)

    async def look(name: str) -> rollout_pb2.Rollout | None:
        async with slots:
            try:
                return (await client.rollouts.GetRollout(rollout_service_pb2.GetRolloutRequest(name=name))).rollout
            except RolloutNotFound:
                return None

    found = await asyncio.gather(*map(look, means))
    return [_score(each, means[each.name]) for each in found if each is not None and each.ended_attempt_count]


def _score(rollout: rollout_pb2.Rollout, mean: float) -> RolloutScore:
    key: RewardKey = ("reward", None, b"")
    return RolloutScore(
        rollout=rollout.name,
        attempt=f"{rollout.name}/attempts/{rollout.ended_attempt_count}",
        training_run=rollout.training_run,
        group=rollout.group_id,
        mode=enum_word(rollout, "mode"),
        rewards={key: mean},
    )
