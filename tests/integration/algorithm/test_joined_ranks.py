"""A run on machines that join it, through all services: waited for, placed, lost with a machine, and gone on with on another."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import training_run_pb2 as pb
from fulmen.rpc.services import connect
from fulmen_cli.local.stack import LocalStack
from tests.support.algorithm.small_training import SETTINGS, STEPS, start_run
from tests.support.algorithm.training import check_books, finished_groups, read_consumed
from tests.support.cli.commands import fulmen
from tests.support.processes import none_holds
from tests.support.stack import running_stack, stack_targets

pytestmark = [pytest.mark.long, pytest.mark.serial, pytest.mark.timeout(600)]

LIMIT_S = 120.0
CAN_HIDE = sys.platform == "linux" and os.geteuid() == 0


@asynccontextmanager
async def machine(stack: LocalStack, folder: Path, node: str, run: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Runs `fulmen-rank` with a token of its own until the block ends."""
    state = stack.folder.path
    issued = await fulmen("token", "issue", "--role", "rank", "--run", run, "--subject", node, "--state-dir", state)
    assert issued.status == 0, issued.stderr
    token = folder / f"{node}.token"
    token.write_text(issued.stdout)
    targets = stack_targets(stack)
    settings = {
        "FULMEN_RANK_TOKEN_FILE": str(token),
        "FULMEN_RANK_STORE_TARGET": targets.store,
        "FULMEN_RANK_ALGORITHM_TARGET": targets.algorithm,
        "FULMEN_RANK_NODE": node,
    }
    # What the services have on disk is not there: the token and their addresses are all that it has.
    hidden = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {state} && exec "$@"', "sh"] if CAN_HIDE else []
    words = [*hidden, sys.executable, "-m", "fulmen_algorithm.rank_agent", "serve"]
    with subprocess.Popen(words, env={**os.environ, **settings, "JOINED_BY": str(folder)}) as process:
        try:
            yield process
        finally:
            process.kill()


async def test_a_run_on_joined_machines_goes_on_with_another_when_one_is_killed(short_tmp_path: Path, repository_root):
    environment = {
        "FULMEN_ALGORITHM_CLUSTERS": json.dumps({"machines": {"kind": "joined", "start_deadline_s": LIMIT_S}}),
        "FULMEN_ALGORITHM_CLUSTER_SILENCE_S": "10",
    }
    parallel = {"kind": "ddp", "ranks": 2, "cluster": "machines", "affinity": "own_nodes"}
    async with (
        running_stack(short_tmp_path / "stack", environment=environment) as stack,
        connect(stack_targets(stack), token=stack.client_token) as client,
    ):
        settings = {**SETTINGS, "parallel": parallel}
        watcher = await start_run(stack, client, repository_root, "far", settings=settings)
        await watcher.until_notice(
            "Waiting for machines: none has joined; the cluster has no nodes. On each machine run"
        )
        async with (
            machine(stack, short_tmp_path, "gpu-1", "far") as first,
            machine(stack, short_tmp_path, "gpu-2", "far") as second,
        ):
            if CAN_HIDE:
                await watcher.until_notice("Files are transferred to it and from it, because it does not see")
            await watcher.until_notice("Placement on cluster 'machines': 2 processes: 1 on gpu-1, 1 on gpu-2.")
            await watcher.until_step(2)
            os.kill(second.pid, signal.SIGKILL)
            await watcher.until_notice("2 nodes are requested (own_nodes), but only 1 can take a process")
            async with machine(stack, short_tmp_path, "gpu-3", "far") as third:
                await watcher.until_notice("Placement on cluster 'machines': 2 processes: 1 on gpu-1, 1 on gpu-3.")
                run = await watcher.end()
                assert run.state == pb.TRAINING_RUN_STATE_SUCCEEDED, watcher.story()
                ended = [asyncio.to_thread(each.wait, LIMIT_S) for each in (first, third)]
                assert await asyncio.gather(*ended) == [0, 0]
        check_books(
            read_consumed(short_tmp_path / "stack/algorithm/runs/default/far"),
            await finished_groups(client, run.name),
            steps=STEPS,
        )
    await none_holds(f"JOINED_BY={short_tmp_path}")
