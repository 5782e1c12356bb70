"""Names of rollouts and training runs as people give them: whole, an id, the beginning of one, or `latest`.

Whole names and whole UUIDs are never looked up. An id of a run that begins other ids too means that run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from fulmen import ids
from fulmen.algorithm.v1 import training_run_pb2, training_run_service_pb2
from fulmen.errors import Unavailable
from fulmen.rpc.services import Services
from fulmen.store.v1 import rollout_service_pb2
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit

__all__ = ["ROLLOUT_FORMS", "RUN_FORMS", "rollout_name", "rollout_names", "run_name", "short_name"]

ROLLOUT_FORMS: Final = "projects/PROJECT/rollouts/UUID, the UUID, its beginning, or `latest`"
RUN_FORMS: Final = "projects/PROJECT/trainingRuns/ID, the ID, its beginning, or `latest`"
LATEST: Final = "latest"
CANDIDATES_SHOWN: Final = 5
PAGE_SIZE: Final = 1000
MAX_STAGES: Final = 16
LOOK_UP_LIMIT_S: Final = 10.0
_UUID_LENGTH: Final = 36
_ROLLOUT: Final = re.compile(r"(latest|[0-9a-f-]{1,36})((?:/attempts/[0-9]+)?)")
# What `fulmen train` calls the runs of its stages; it is not looked up.
_TRAINED: Final = re.compile(r".+-\d{8}-\d{6}-[0-9a-z]+-\d+-[a-z0-9_]+")


async def rollout_name(given: str, connection: Connection, client: Services) -> str:
    """Returns the name of a rollout, or of an attempt if `/attempts/N` follows; short ones are of the token's project.

    Raises:
        CommandFailed: if no rollout or more than one is meant.
        FulmenError: if the store refuses.
    """
    if given.startswith("projects/"):
        return given
    match = _ROLLOUT.fullmatch(given.lower())
    if match is None:
        raise CommandFailed(f"{given!r} is not a rollout: give {ROLLOUT_FORMS}.", exit_code=Exit.USAGE)
    start, attempt = match.groups()
    project = connection.project
    if len(start) == _UUID_LENGTH:
        return ids.rollout_name(project, start) + attempt
    request = rollout_service_pb2.ListRolloutsRequest(
        project=project,
        filter="" if start == LATEST else f'name = "{ids.rollout_name(project, start)}*"',
        page_size=1 if start == LATEST else CANDIDATES_SHOWN + 1,
    )
    found: list[str] = []
    while not found or (start != LATEST and len(found) <= CANDIDATES_SHOWN):
        page = await client.rollouts.ListRollouts(request)
        found += [short_name(rollout.name) for rollout in page.rollouts]
        request.page_token = page.next_page_token
        if not page.next_page_token:
            break
    return ids.rollout_name(project, _only("rollout", start, found, where=project)) + attempt


async def rollout_names(given: Sequence[str], connection: Connection, client: Services) -> list[str]:
    """Returns the names of several rollouts, each as `rollout_name` does."""
    return [await rollout_name(each, connection, client) for each in given]


async def run_name(given: str, connection: Connection, client: Services, *, project: str = "") -> str:
    """Returns the name of a training run; short ones are of the token's project or the given one. Empty stays empty.

    An id that begins no known run, or that cannot be looked up, is taken for a whole one: the store knows runs that no
    algorithm service does.

    Raises:
        CommandFailed: if more than one run is meant, or `latest` and there is none.
        FulmenError: if the algorithm service refuses.
    """
    if not given or given.startswith("projects/"):
        return given
    project = project or connection.project
    whole = ids.training_run_name(project, given)
    if _TRAINED.fullmatch(given):
        return whole
    try:
        found = await _runs(given, client, project)
    except Unavailable:
        if given == LATEST:
            raise
        return whole
    if given in found or (not found and given != LATEST):
        return whole
    return ids.training_run_name(project, _only("training run", given, found, where=project))


def short_name(name: str) -> str:
    """Returns the id in a name: the part after its last slash."""
    return name.rpartition("/")[2]


async def _runs(given: str, client: Services, project: str) -> list[str]:
    """Returns the ids of the runs that are meant, newest first; of the latest training, the stage that began last."""
    request = training_run_service_pb2.ListTrainingRunsRequest(
        project=project, page_size=MAX_STAGES if given == LATEST else PAGE_SIZE
    )
    found: list[str] = []
    while True:
        page = await client.training_runs.ListTrainingRuns(request, timeout=LOOK_UP_LIMIT_S)
        found += [short_name(run.name) for run in page.training_runs]
        request.page_token = page.next_page_token
        if given == LATEST:
            return [short_name(_begun_last(page.training_runs))] if found else []
        if not page.next_page_token:
            return [each for each in found if each.startswith(given)]


def _begun_last(runs: Sequence[training_run_pb2.TrainingRun]) -> str:
    newest = runs[0]
    stages = newest.stages or [newest.name]
    begun = {run.name for run in runs if run.HasField("start_time")}
    return next((name for name in reversed(stages) if name in begun), stages[0])


def _only(kind: str, given: str, found: Sequence[str], *, where: str) -> str:
    if len(found) == 1:
        return found[0]
    if not found:
        text = f"{where} has no {kind}" + ("" if given == LATEST else f" that begins with {given!r}")
        raise CommandFailed(f"{text}.", exit_code=Exit.NOT_FOUND)
    shown = "".join(f"\n  {each}" for each in found[:CANDIDATES_SHOWN])
    more = "\n  …" if len(found) > CANDIDATES_SHOWN else ""
    raise CommandFailed(
        f"{given!r} is the beginning of several {kind}s, newest first:{shown}{more}", exit_code=Exit.USAGE
    )
