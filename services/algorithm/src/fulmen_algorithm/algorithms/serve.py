"""Serves a policy version for a time; trains nothing and runs no agent.

While the run is active no other run takes its engine, and none trains the policy. Afterwards the engine serves on until its
slot is needed, like that of any ended run.
"""

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Literal

from pydantic import Field

from fulmen_algorithm.runs.algorithm import AlgorithmEntry, RunSettings
from fulmen_algorithm.runs.context import RunContext
from fulmen_algorithm.runs.failure import RunFailed

SERVED = "served_version"
"""Result with the number of the version, once it is served."""


class ServeSettings(RunSettings):
    """Settings of `serve`.

    Attributes:
        steps: Always 1.
        hours: Hours for which the version is served, counted from the start of the run, including restarts of the
            service.
    """

    steps: Literal[1] = 1
    hours: float = Field(default=1.0, gt=0, le=720)


class Serve:
    """Serves a version of a policy without training it."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        """Serves until the time is over or the run is stopped; see `Algorithm`."""
        if ctx.progress.step:
            return
        if ctx.served is None:
            raise RunFailed('The run names no policy to serve. Set `policy`, such as [policy] name = "solver".')
        with ctx.recorder.spending("start"):
            await ctx.served.serve({})
        until = (ctx.run.start_time or ctx.run.create_time) + timedelta(hours=self._settings.hours)
        ctx.recorder.result(**{SERVED: float(ctx.served.published.version)})
        ctx.notify("info", f"{ctx.served.name} is served as `{ctx.run.policy.name}` until {until:%Y-%m-%d %H:%M} UTC.")
        left_s = (until - datetime.now(UTC)).total_seconds()
        await ctx.control.unless_stopped(asyncio.sleep(max(0.0, left_s)))
        ctx.recorder.commit()
        await ctx.recorder.end_step({})


ENTRIES = (AlgorithmEntry(name="serve", settings=ServeSettings, make=Serve, trains=False),)
