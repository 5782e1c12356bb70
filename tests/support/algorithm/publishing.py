"""An algorithm that trains one supervised step, and publishes, whenever it is told to: for what happens around versions.

Loaded by the service as a file (`FULMEN_ALGORITHM_MODULES`). Step n begins when the file `orders/n` appears.
"""

import asyncio
import time
from pathlib import Path

from fulmen_algorithm.extension import AlgorithmEntry, AlgorithmSettings, RunContext
from fulmen_algorithm.training.rows import sft_row
from fulmen_algorithm.training.settings import StepSettings

ASK_AGAIN_S = 0.02


class PublishingSettings(AlgorithmSettings):
    orders: str


class Publishing:
    def __init__(self, settings: PublishingSettings) -> None:
        self._settings = settings

    async def run(self, ctx: RunContext) -> None:
        settings, tokenizer = self._settings, ctx.policy.tokenizer
        rows = [sft_row(tokenizer, each.messages, row_id=str(i)) for i, each in enumerate(ctx.inputs.demonstrations)]
        await ctx.policy.serve({})
        while ctx.progress.step < settings.steps:
            await ctx.control.unless_stopped(_appears(Path(settings.orders) / str(ctx.progress.step + 1)))
            await ctx.policy.train_supervised(rows, settings=StepSettings(token_budget=settings.token_budget))
            ctx.recorder.commit()
            started = time.monotonic()
            await ctx.policy.publish()
            await ctx.recorder.end_step({"published_s": time.monotonic() - started})


async def _appears(path: Path) -> None:
    while not path.exists():  # noqa: ASYNC110
        await asyncio.sleep(ASK_AGAIN_S)


ENTRIES = (AlgorithmEntry(name="publishing", settings=PublishingSettings, make=Publishing, needs=("demonstrations",)),)
