"""Names of rollouts and runs that people shorten."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any, cast

import pytest

from fulmen.algorithm.v1 import training_run_pb2
from fulmen.algorithm.v1 import training_run_service_pb2 as runs_pb
from fulmen.errors import Unavailable
from fulmen.ids import training_run_name
from fulmen.rpc.services import Services
from fulmen.store.v1 import rollout_pb2
from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.names import rollout_name, run_name

UUID = "0192f0c1-7a6e-7c53-9f3e-0123456789ab"
TRAINED = "arithmetic-20260314-101500-x7k2-2-grpo"


class KnownServices:
    """The services with these rollouts and runs, newest first; a page holds two. Counts how often they are asked."""

    def __init__(
        self,
        *,
        rollouts: tuple[str, ...] = (),
        runs: tuple[str, ...] | None = (),
        stages: Sequence[training_run_pb2.TrainingRun] = (),
    ) -> None:
        self.known, self.runs, self.stages = rollouts, runs, stages
        self.asked = 0

    @property
    def rollouts(self) -> KnownServices:
        """The stub of the store."""
        return self

    @property
    def training_runs(self) -> KnownServices:
        """The stub of the algorithm service."""
        return self

    async def ListRollouts(self, request: pb.ListRolloutsRequest) -> pb.ListRolloutsResponse:
        """Returns one page."""
        self.asked += 1
        start = request.filter.rpartition("/")[2].rstrip('*"')
        found = [each for each in self.known if each.startswith(start)]
        page, token = _page(found, request)
        rollouts = [rollout_pb2.Rollout(name=f"{request.project}/rollouts/{each}") for each in page]
        return pb.ListRolloutsResponse(rollouts=rollouts, next_page_token=token)

    async def ListTrainingRuns(
        self, request: runs_pb.ListTrainingRunsRequest, *, timeout: float
    ) -> runs_pb.ListTrainingRunsResponse:
        """Returns one page; fails if no runs are known."""
        self.asked += 1
        if self.runs is None:
            raise Unavailable("Connection refused")
        if self.stages:
            return runs_pb.ListTrainingRunsResponse(training_runs=self.stages)
        page, token = _page(list(self.runs), request)
        runs = [training_run_pb2.TrainingRun(name=training_run_name(request.project, each)) for each in page]
        return runs_pb.ListTrainingRunsResponse(training_runs=runs, next_page_token=token)


def _page(found: list[str], request: pb.ListRolloutsRequest | runs_pb.ListTrainingRunsRequest) -> tuple[list[str], str]:
    start = int(request.page_token or 0)
    end = start + min(2, request.page_size)
    return found[start:end], str(end) if len(found) > end else ""


def connection(project: str | None = None) -> Connection:
    """Returns a connection with a token that is bound to a project, or with none."""
    if project is None:
        return Connection(store_target="127.0.0.1:1")
    payload = base64.urlsafe_b64encode(json.dumps({"prj": project, "exp": 0}).encode()).rstrip(b"=").decode()
    return Connection(token=f"e30.{payload}.signature")


async def rollout(given: str, *known: str) -> str:
    """Returns the rollout that is meant."""
    return await rollout_name(given, connection(), cast(Services, KnownServices(rollouts=known)))


async def run(given: str, *known: str) -> str:
    """Returns the id of the run that is meant."""
    name = await run_name(given, connection(), cast(Services, KnownServices(runs=known)))
    return name.removeprefix("projects/default/trainingRuns/")


@pytest.mark.parametrize(
    ("bound_to", "project"),
    [("projects/a", "projects/a"), ("projects/*", "projects/default"), (None, "projects/default")],
)
async def test_whole_names_are_completed_with_the_project_of_the_token_and_never_looked_up(
    bound_to: str | None, project: str
) -> None:
    caller, services = connection(bound_to), KnownServices()
    client: Any = services
    assert await rollout_name(UUID, caller, client) == f"{project}/rollouts/{UUID}"
    assert await rollout_name(f"{UUID.upper()}/attempts/2", caller, client) == f"{project}/rollouts/{UUID}/attempts/2"
    assert await rollout_name(f"projects/b/rollouts/{UUID}", caller, client) == f"projects/b/rollouts/{UUID}"
    assert await run_name(TRAINED, caller, client) == training_run_name(project, TRAINED)
    assert await run_name(TRAINED, caller, client, project="projects/c") == training_run_name("projects/c", TRAINED)
    assert await run_name("projects/b/trainingRuns/x", caller, client) == "projects/b/trainingRuns/x"
    assert await run_name("", caller, client) == ""
    assert services.asked == 0


async def test_the_beginning_of_an_id_and_latest_find_the_one_that_is_meant() -> None:
    other = "0192f0c2-0000-7000-8000-000000000000"
    assert await rollout("0192f0c1", other, UUID) == f"projects/default/rollouts/{UUID}"
    assert await rollout("0192F0C1-7/attempts/3", other, UUID) == f"projects/default/rollouts/{UUID}/attempts/3"
    assert await rollout("latest", other, UUID) == f"projects/default/rollouts/{other}"
    assert await rollout("latest/attempts/1", other) == f"projects/default/rollouts/{other}/attempts/1"
    assert await run("b", "c", "a2", "a1", "b-long-name") == "b-long-name"
    assert await run("latest", "c", "a") == "c"


async def test_the_latest_of_several_stages_is_the_one_that_began_last() -> None:
    stages = [training_run_name("projects/default", each) for each in ("1", "2", "3")]
    for begun, meant in ((0, "1"), (1, "1"), (2, "2"), (3, "3")):
        runs = [training_run_pb2.TrainingRun(name=name, stages=stages) for name in reversed(stages)]
        for each in runs[3 - begun :]:
            each.start_time.GetCurrentTime()
        client = cast(Services, KnownServices(runs=(), stages=[*runs, training_run_pb2.TrainingRun(name="older")]))
        assert (await run_name("latest", connection(), client)).rpartition("/")[2] == meant


async def test_an_id_that_begins_others_means_itself() -> None:
    assert await run("a", "ab", "abc", "x", "a") == "a"


async def test_an_ambiguous_beginning_lists_the_candidates() -> None:
    ids = [f"0192f0c1-7a6e-7c53-9f3e-00000000000{number}" for number in range(9)]
    with pytest.raises(CommandFailed) as refused:
        await rollout("0192", *ids)
    assert refused.value.exit_code == Exit.USAGE
    assert str(refused.value).split("\n") == [
        "'0192' is the beginning of several rollouts, newest first:", *(f"  {each}" for each in ids[:5]), "  …",
    ]  # fmt: skip
    with pytest.raises(CommandFailed, match=r"several training runs, newest first:\n  a3\n  a2\n  a1$"):
        await run("a", "a3", "b", "a2", "a1")


@pytest.mark.parametrize("given", ["0193", "latest"])
async def test_nothing_that_is_meant_is_said(given: str) -> None:
    with pytest.raises(CommandFailed, match="projects/default has no rollout") as refused:
        await rollout(given, *([] if given == "latest" else [UUID]))
    assert refused.value.exit_code == Exit.NOT_FOUND


@pytest.mark.parametrize("given", ["", "x", "0192*", "latest2", f"{UUID}0", "a/rollouts"])
async def test_what_cannot_begin_an_id_is_wrong_usage(given: str) -> None:
    with pytest.raises(CommandFailed, match="is not a rollout: give") as refused:
        await rollout(given, UUID)
    assert refused.value.exit_code == Exit.USAGE


async def test_a_run_that_the_algorithm_service_does_not_tell_is_taken_as_it_is_given() -> None:
    assert await run("mine", "other") == "mine"
    away: Any = KnownServices(runs=None)
    assert await run_name("mine", connection(), away) == "projects/default/trainingRuns/mine"
    with pytest.raises(Unavailable):
        await run_name("latest", connection(), away)
