"""Serves past versions of the policy as opponents; see `PastOpponent`.

The pool and the present opponent are in `progress.memory`, so a resumed run continues with them.
"""

import random
from collections.abc import Mapping

from fulmen_algorithm.algorithms.options.opponent_settings import OpponentSettings, PastOpponent
from fulmen_algorithm.runs.context import RunContext

MEMORY = "opponents"


class Opponents:
    """The opponents of a run."""

    def __init__(
        self,
        ctx: RunContext,
        settings: OpponentSettings,
        *,
        seed: int,
        overrides: Mapping[str, Mapping[str, object]],
    ) -> None:
        """Initializes the opponents.

        Args:
            ctx: The run.
            settings: Which versions they are.
            seed: Seed of the draws.
            overrides: Request fields by rollout mode; see `Policy.serve`.
        """
        self._ctx = ctx
        self._settings = settings if isinstance(settings, PastOpponent) else None
        self._seed = seed
        self._overrides = overrides
        self._served = 0

    def begin(self) -> None:
        """Protects the weights of the pool; call it before anything is published."""
        if self._settings is not None:
            self._ctx.policy.hold(self._pool())

    async def refresh(self) -> dict[str, float]:
        """Serves the opponent of the present step, whose weights are published; returns metrics.

        Raises:
            RunFailed: if no engine can be started in addition to the policy's.
            Interrupted: if the run was asked to stop.
        """
        if self._settings is None:
            return {}
        ctx, step = self._ctx, self._ctx.progress.step
        known, pool = ctx.progress.memory.get(MEMORY, {}), self._pool()
        present = known.get("present", 0)
        if (step % self._settings.every == 0 and known.get("step") != step) or present not in pool:
            pool = [*(v for v in pool if v != ctx.policy.version), ctx.policy.version][-self._settings.keep :]
            present = self._picked(pool, step)
            ctx.policy.hold(pool)
            ctx.recorder.remember(**{MEMORY: {"pool": pool, "present": present, "step": step}})
        if present != self._served:
            await ctx.policy.serve_past(present, self._overrides)
            self._served = present
        then = ctx.policy.step_of(present)
        return {
            "opponent_version": float(present),
            "opponent_age_steps": float(step - (step if then is None else then)),
        }

    def _picked(self, pool: list[int], step: int) -> int:
        if self._settings is None or self._settings.pick == "latest":
            return pool[-1]
        return random.Random(f"{self._seed}/{MEMORY}/{step}").choice(pool)

    def _pool(self) -> list[int]:
        """Lists the versions of the pool; those whose weights a later step of an earlier life has removed are left out."""
        pool: list[int] = self._ctx.progress.memory.get(MEMORY, {}).get("pool", [])
        return [version for version in pool if self._ctx.policy.has(version)]
