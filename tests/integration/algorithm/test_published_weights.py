"""A run publishes deltas through the real store, proxy and engine."""

import json
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.rpc.services import connect
from fulmen.store.v1 import resource_service_pb2
from fulmen_algorithm.weights.delta import DELTA_FILE, read_header
from tests.support.algorithm.small_training import SETTINGS, start_run
from tests.support.algorithm.training import POLICY
from tests.support.stack import running_stack, stack_targets

pytestmark = [
    pytest.mark.long,
    pytest.mark.serial,
    pytest.mark.timeout(420),
]

STEPS = 3
WEIGHTS = {"kind": "delta", "dtype": "bfloat16", "full_every": 20, "dense_above": 1.0}


async def test_versions_by_delta_are_served_and_the_best_has_an_alias(short_tmp_path, repository_root):
    settings = {**SETTINGS, "steps": STEPS, "weights": WEIGHTS, "learning_rate": 1e-5}
    async with (
        running_stack(short_tmp_path) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        watcher = await start_run(stack, client, repository_root, "by-delta", settings=settings)
        ended = await watcher.end()
        assert ended.state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
        names = [f"resources/policy.{POLICY}/versions/{n}" for n in range(1, STEPS + 2)]
        names.append(f"resources/policy.{POLICY}/aliases/best")
        found = await client.resources.GetResources(resource_service_pb2.GetResourcesRequest(names=names))
        versions = [json.loads(resource.content) for resource in found.resources[: STEPS + 1]]
        assert [v["kind"] for v in versions] == ["full", "delta", "delta", "full"]
        header = read_header(Path(versions[2]["path"]) / DELTA_FILE)
        assert (header.base_sha256, header.sha256) == (versions[1]["sha256"], versions[2]["sha256"])
        assert found.resources[-1].name in names[: STEPS + 1]
        metrics = [e.step.values for e in watcher.events if e.HasField("step")]
        # The engine took each delta as it was: it read no more than that.
        deltas = [f for f in metrics if "delta_changed_share" in f]
        assert deltas
        assert all(0 < f["publish_bytes"] < f["publish_bytes_full"] for f in deltas)
        assert all(f["publish_pause_ms"] > 0 for f in deltas)
        assert not [text for text in watcher.notices() if "is restarted" in text]
