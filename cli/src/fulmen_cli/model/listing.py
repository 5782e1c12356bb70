"""`fulmen model list`: what was trained, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import typer

from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.errors import FulmenError
from fulmen.models.card import base_of
from fulmen.policy_versions import PolicyVersion
from fulmen.rpc.services import Services
from fulmen.store.v1 import resource_service_pb2
from fulmen.training.following import read_steps
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.model.versions import KIND, read_versions
from fulmen_cli.names import short_name
from fulmen_cli.output import as_dict, print_json, print_rows

__all__ = ["list_models", "validation_of"]

PAGE_SIZE: Final = 1000
VALIDATION: Final = "validation_accuracy"


async def list_models(
    connection: Connection,
    policy: Annotated[
        str, typer.Argument(help="List all versions of this policy; by default the newest of each.")
    ] = "",
    limit: Annotated[int, typer.Option(min=1, max=PAGE_SIZE, help="Maximum number of results.")] = 50,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists trained models: version, base, run, step, validation, size and where the weights are.

    Examples:

        fulmen model list

        fulmen model list solver
    """
    parent = f"resources/policy.{policy.removeprefix('policy.')}" if policy else ""
    request = resource_service_pb2.ListResourceVersionsRequest(parent=parent, kind=KIND, page_size=limit)
    async with connection.open() as client:
        answer = await client.resources.ListResourceVersions(request)
        found = await read_versions([each.name for each in answer.resources], connection, client)
        runs = await _runs(client, {each.run for each in found if each.run})
        validations = {name: await _validations(client, run) for name, run in runs.items()}
    aliases: dict[str, list[str]] = {}
    for alias in answer.aliases:
        resource, _, name = alias.name.partition("/aliases/")
        aliases.setdefault(f"{resource}/versions/{alias.version}", []).append(name)
    if output is Output.JSON:
        print_json([_as_json(each, runs, validations, aliases) for each in found])
        return
    rows = [
        (
            each.short,
            ", ".join(sorted(aliases.get(each.name, []))),
            base_of(runs.get(each.run)),
            short_name(each.run),
            str(each.step),
            _number(validation_of(each, validations)),
            each.kind,
            _size(each.size_bytes),
            each.path,
        )
        for each in found
    ]
    print_rows(
        output,
        ("model", "aliases", "base", "run", "step", "validation", "kind", "size", "folder"),
        rows,
        messages=[each.resource for each in found],
        empty="No models yet: `fulmen train CONFIG` trains one.",
        right=("step", "validation", "size"),
        spare=("folder", "kind", "run", "size"),
    )


def validation_of(version: PolicyVersion, validations: Mapping[str, Mapping[int, float]]) -> float | None:
    """Returns the validation accuracy of the step that wrote a version; None if it was not validated."""
    return validations.get(version.run, {}).get(version.step)


async def _runs(client: Services, names: set[str]) -> dict[str, training_run_pb2.TrainingRun]:
    """Reads runs; deleted ones, and runs of an unavailable algorithm service, are left out."""
    found: dict[str, training_run_pb2.TrainingRun] = {}
    for name in sorted(names):
        try:
            request = training_run_service_pb2.GetTrainingRunRequest(name=name)
            found[name] = (await client.training_runs.GetTrainingRun(request)).training_run
        except FulmenError:
            continue
    return found


async def _validations(client: Services, run: training_run_pb2.TrainingRun) -> dict[int, float]:
    return {each.step: each.values[VALIDATION] for each in await read_steps(client, run) if VALIDATION in each.values}


def _as_json(
    version: PolicyVersion,
    runs: Mapping[str, training_run_pb2.TrainingRun],
    validations: Mapping[str, Mapping[int, float]],
    aliases: Mapping[str, Sequence[str]],
) -> dict[str, object]:
    described = as_dict(version.resource)
    described.pop("content", None)
    return {
        **described,
        "policy": version.policy,
        "aliases": sorted(aliases.get(version.name, ())),
        "weights": version.kind,
        "path": version.path,
        "base": base_of(runs.get(version.run)),
        "run": version.run,
        "step": version.step,
        "validation_accuracy": validation_of(version, validations),
        "weights_bytes": version.size_bytes,
        "weights_sha256": version.sha256,
    }


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _size(size_bytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes} B"
