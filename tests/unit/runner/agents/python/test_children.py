"""Children that cannot be started fail the attempts that wait for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.environment import Endpoints
from fulmen_runner.agents.python.children import ChildHost, ChildPolicy, ChildProgram, Children
from fulmen_runner.agents.specification import NO_LIMITS
from fulmen_runner.attempts.errors import AgentFailed, HostUnavailable
from fulmen_runner.attempts.workspace import Files
from fulmen_service_kit.isolation.levels import Isolation


class Broken:
    """An isolation that fails every launch."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def launch(self, *_: object, **__: object) -> None:
        raise self._error


@pytest.mark.parametrize("error", [AgentFailed("no"), HostUnavailable("no sandbox"), OSError(28, "full")], ids=repr)
async def test_every_attempt_hears_why_its_child_was_not_started(error: Exception, tmp_path: Path) -> None:
    host = ChildHost(
        guardian=Guardian(),
        inherited={},
        endpoints=Endpoints(llm_proxy_url="", otlp_url=""),
        flush_s=1,
        output_allowed_bytes=1,
        limits=NO_LIMITS,
        isolation=Broken(error),  # type: ignore[arg-type]
    )
    children = Children(host=host, policy=ChildPolicy(max_attempts=1, max_idle=0, idle_timeout_s=1))
    program = ChildProgram(
        target="a:f",
        directory=None,
        grading=False,
        graded=False,
        environment=(),
        limits=NO_LIMITS,
        level=Isolation.PROCESS,
        folder=tmp_path / "homes",
    )
    files = Files(root=tmp_path, work_dir=tmp_path, temporary_dir=tmp_path, task_file=tmp_path, progress_file=tmp_path)
    async with asyncio.timeout(10):
        ended = await asyncio.gather(
            *(children.call(program, {}, b"", files) for _ in range(5)), return_exceptions=True
        )
        await children.close()
    assert ended == [error] * 5
