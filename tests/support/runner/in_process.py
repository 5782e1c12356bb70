"""Python agents in the process of the test, without a runner."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fulmen.agent import Context
from fulmen_runner.agents.command.guardian import Guardian
from fulmen_runner.agents.environment import Endpoints
from fulmen_runner.agents.python.children import ChildHost, ChildPolicy, Children
from fulmen_runner.agents.python.host import PythonHost
from fulmen_runner.agents.specification import NO_LIMITS
from fulmen_runner.agents.tracing.export import RunnerExporter
from fulmen_runner.agents.tracing.spans import AttemptSpans
from fulmen_runner.attempts.assignment import Assignment
from fulmen_runner.attempts.program import Invocation
from fulmen_runner.attempts.stragglers import Stragglers
from fulmen_runner.attempts.workspace import Workspaces

TIMEOUT_S = 60


@asynccontextmanager
async def python_host(llm_proxy_url: str = "") -> AsyncIterator[PythonHost]:
    """Yields a host of Python agents; its spans go nowhere."""
    endpoints = Endpoints(llm_proxy_url=llm_proxy_url, otlp_url="http://127.0.0.1:9")
    child_host = ChildHost(
        guardian=Guardian(), inherited={}, endpoints=endpoints, flush_s=1, output_allowed_bytes=1, limits=NO_LIMITS
    )
    children = Children(host=child_host, policy=ChildPolicy(max_attempts=1, max_idle=0, idle_timeout_s=1))
    spans = AttemptSpans(RunnerExporter(otlp_url=endpoints.otlp_url, token=str, tls=None, timeout_s=1), flush_s=1)
    yield PythonHost(stragglers=Stragglers(), spans=spans, children=children)
    await spans.close()


def invocation_of(item: Assignment, workspaces: Workspaces, **environment: str) -> Invocation:
    """Returns the invocation of an agent, with a context that is not entered yet."""
    context = Context(
        rollout=item.rollout,
        attempt=item.attempt,
        attempt_number=1,
        mode="train",
        deadline=time.monotonic() + TIMEOUT_S,
        environment=environment,
    )
    return Invocation(assignment=item, task=item.task(), context=context, workspace=workspaces.of(item.input))
