"""A Docker engine for tests, if one answers, and an image of their own."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from pathlib import Path

import aiodocker
import pytest

__all__ = ["BASE_IMAGE", "TEST_IMAGE", "USER_ID", "build_test_image", "engine_address", "missing", "require_engine"]

BASE_IMAGE = "python:3.11-slim"
TEST_IMAGE = "fulmen-tests-agent:1"
USER_ID = 10_007

_DOCKERFILE = f"""
FROM {BASE_IMAGE}
USER {USER_ID}
WORKDIR /tmp
CMD ["python", "-c", "import os; print(os.getuid())"]
"""


def engine_address() -> str:
    """Returns where the engine is, as the docker command line finds it."""
    return os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"


def missing() -> str:
    """Returns why no engine can be asked; empty if one answers."""
    scheme, _, path = engine_address().partition("://")
    if scheme == "unix" and not Path(path).is_socket():
        return f"no Docker engine at {engine_address()}"
    try:
        done = subprocess.run(["docker", "info"], capture_output=True, timeout=20, check=False)
    except FileNotFoundError:
        return "no docker command"
    except subprocess.TimeoutExpired:
        return f"the Docker engine at {engine_address()} does not answer"
    return f"no Docker engine answers at {engine_address()}" if done.returncode else ""


def require_engine() -> None:
    """Skips the test if no engine answers."""
    why = missing()
    if why:
        pytest.skip(f"{why}: `apt-get install docker.io` and `systemctl start docker` bring one")


async def build_test_image() -> None:
    """Builds an image that runs as a user of its own; takes the base image as it is, or pulls it."""
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        member = tarfile.TarInfo("Dockerfile")
        member.size = len(_DOCKERFILE)
        tar.addfile(member, io.BytesIO(_DOCKERFILE.encode()))
    context.seek(0)
    async with aiodocker.Docker(engine_address()) as docker:
        await docker.images.build(fileobj=context, encoding="utf-8", tag=TEST_IMAGE)
