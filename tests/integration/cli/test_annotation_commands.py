"""Scores by people, the audit log and usage in time from the command line, against a real store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

from click.testing import Result

from fulmen.scores import read_scores
from fulmen.store.v1 import resource_service_pb2
from fulmen.store.v1 import usage_service_pb2 as pb
from fulmen_cli.exits import Exit
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import Runner, StoreHandle, Stubs, create, create_project

Fulmen = Callable[..., Awaitable[Result]]
LIMIT_S = 20.0


async def test_people_score_rollouts_and_publish_the_means_as_rewards(
    fulmen: Fulmen, store: StoreHandle, stubs: Stubs
) -> None:
    rollouts = await create(stubs, 2, group_id="g", group_size=2)
    runner = await Runner(await store.stubs(role=Role.RUNNER)).open()
    await runner.complete(await runner.take(2))
    (waiting,) = await create(stubs)
    tokens = {name: store.token(Role.CLIENT, subject=name) for name in ("ann", "bob")}
    for name, values in (("ann", (1, 4)), ("bob", (2, 4))):
        for rollout, value in zip(rollouts, values, strict=True):
            await fulmen("annotations", "add", rollout, str(value), "-d", "tone", token=tokens[name])
    await fulmen("annotations", "add", waiting, "1", "-d", "tone", token=tokens["ann"])
    again = await fulmen("annotations", "add", rollouts[0], "3", "-d", "tone", "--comment", "hm", token=tokens["ann"])
    assert again.stdout.startswith("ann gives ")
    mine = json.loads((await fulmen("annotations", "list", "--author", "ann", "-o", "json")).stdout)
    assert [(each["value"], each.get("comment", "")) for each in mine] == [(1, ""), (4, ""), (3, "hm")]
    assert "bob" in (await fulmen("annotations", "list", "--rollout", rollouts[0])).stdout
    agreed = (await fulmen("annotations", "agreement", "-d", "tone", "--level", "ordinal")).stdout
    assert "over 2 rollouts" in agreed
    assert "ann: 3 scores" in agreed
    published = (await fulmen("annotations", "publish", "scores.people", "-d", "tone")).stdout
    assert "2 rollouts. Published resources/scores.people/versions/1." in published
    request = resource_service_pb2.GetResourcesRequest(names=["resources/scores.people"])
    (version,) = (await stubs.resources.GetResources(request)).resources
    scores = read_scores(version.content)
    assert {each.rollout: each.final for each in scores.rollouts} == dict(zip(rollouts, (2.5, 4.0), strict=True))
    assert {(each.group, each.mode) for each in scores.rollouts} == {("g", "train")}
    await fulmen("annotations", "delete", mine[0]["name"], token=tokens["bob"], status=Exit.NOT_FOUND)
    await fulmen("annotations", "delete", mine[0]["name"].rpartition("/")[2], token=tokens["ann"])
    await fulmen("annotations", "publish", "scores.none", "-d", "other", status=Exit.NOT_FOUND)


async def test_the_audit_log_is_shown_newest_first(fulmen: Fulmen) -> None:
    await fulmen("project", "pause", "default", "--reason", "lunch")
    async with asyncio.timeout(LIMIT_S):
        shown = ""
        while "PauseQueue" not in shown:
            await asyncio.sleep(0.05)
            shown = (await fulmen("audit", "--action", "PauseQueue", "--days", "1")).stdout
    assert "reason=lunch" in shown
    assert "No entries." in (await fulmen("audit", "--errors", "--actor", "nobody")).stdout
    await fulmen("audit", role=Role.CLIENT, status=Exit.FAILED)


async def test_usage_is_shown_by_day_hour_and_project(fulmen: Fulmen, stubs: Stubs) -> None:
    await create_project(stubs, "projects/a")
    usage = [
        pb.UsageDelta(project=project, model="tiny", usage=pb.Usage(request_count=count, cost_micros=500_000))
        for project, count in (("projects/default", 3), ("projects/a", 5))
    ]
    await stubs.usage.SyncUsage(pb.SyncUsageRequest(instance_id="i", sequence=1, usage=usage))
    for by in ("day", "hour"):
        points = json.loads((await fulmen("usage", "--by", by, "-o", "json")).stdout)
        assert [point["usage"]["request_count"] for point in points] == ["3"]
        assert "0.5000" in (await fulmen("usage", "--by", by, "--days", "2")).stdout
    shown = (await fulmen("usage", "--by", "project")).stdout
    assert "projects/a" in shown
    assert "projects/default" in shown
    await fulmen("usage", "--by", "day", "--rollout", "0197", status=Exit.USAGE)
    assert "(none)" not in (await fulmen("usage", "--by", "agent")).stdout
