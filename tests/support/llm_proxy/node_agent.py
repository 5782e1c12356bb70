"""Runs an agent in Node.js with its vendor's own unmodified package."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

LIMIT_S = 60


async def play(root: Path, script: str, package: str, *, failing: bool, **environment: str) -> dict[str, Any]:
    """Runs the agent to its end; returns what it saw.

    Args:
        root: of the repository, where the packages are.
        script: of the folder `node`.
        package: that it needs.
        failing: the backends behave badly, and it is to tell how.
        environment: of the agent, beside this process's.
    """
    node = shutil.which("node")
    assert node is not None, "Node.js is needed: install it (Debian: apt-get install nodejs npm)"
    assert (root / "node_modules" / package).is_dir(), "run `make test`, which installs the vendors' packages"
    agent = await asyncio.create_subprocess_exec(
        node,
        f"tests/integration/llm_proxy/node/{script}",
        *(["failing"] if failing else []),
        cwd=root,
        env={**os.environ, **environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LIMIT_S):
        out, errors = await agent.communicate()
    assert agent.returncode == 0, errors.decode()
    seen: dict[str, Any] = json.loads(out)
    return seen
