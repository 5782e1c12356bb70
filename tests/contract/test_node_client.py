"""A client in another language, made from the .proto files alone, does everything that a runner does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fulmen.local.stack import LocalStack, StackSettings

LIMIT_S = 60


@pytest.fixture
async def store(short_tmp_path: Path) -> AsyncIterator[LocalStack]:
    """Yields a stack of which only the database and the store run."""
    stack = LocalStack(StackSettings(state_dir=short_tmp_path / "state", use_default_ports=False))
    await stack.prepare()
    try:
        await stack.start_service("store")
        yield stack
    finally:
        await stack.stop()


def run_client(root: Path, *, target: str, token: str) -> subprocess.CompletedProcess[str]:
    """Runs the Node client against a store."""
    node = shutil.which("node")
    assert node is not None, "Node.js is needed: install it (Debian: apt-get install nodejs npm)"
    assert (root / "node_modules/@grpc/grpc-js").is_dir(), "run `make test`, which installs the client's packages"
    return subprocess.run(
        [node, "clients/node/main.js"],
        cwd=root,
        env={**os.environ, "FULMEN_STORE_TARGET": target, "FULMEN_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


async def test_a_node_client_creates_leases_and_completes_a_rollout(store: LocalStack, repository_root: Path) -> None:
    ended = run_client(repository_root, target=store.targets["store"], token=store.client_token)

    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["state"] == "ROLLOUT_STATE_SUCCEEDED"
    assert report["acks"] == [{"attempt": f"{report['name']}/attempts/1", "status": "COMPLETION_STATUS_APPLIED"}]
    assert report["reward"] == 1
    assert report["output"] == {"answer": 42}


async def test_a_node_client_with_a_wrong_token_gets_one_clear_error(store: LocalStack, repository_root: Path) -> None:
    ended = run_client(repository_root, target=store.targets["store"], token="not-a-token")

    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == "UNAUTHENTICATED: The token is malformed or was not made by this deployment.\n"
