"""One runner of Agent Lightning 0.3.0, as its Trainer starts them; runs inside its own virtual environment.

`python agent_lightning.py URL WORKER AGENT COUNT` runs COUNT rollouts of an agent of `agents.py` one after the other and
prints one JSON object. `... URL 0 enqueue COUNT` queues them.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from agentlightning import LitAgent, LitAgentRunner, OtelTracer
from agentlightning.store import LightningStoreClient

POLL_S = 0.05
"""Its default is 5 s, which would measure its waiting."""


def agent_named(name: str) -> LitAgent[Any]:
    """Wraps an agent of the benchmark as its API wants it."""
    spec = importlib.util.spec_from_file_location("agents", Path(__file__).with_name("agents.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)

    class Wrapped(LitAgent[Any]):
        async def rollout_async(self, task: Any, resources: Any, rollout: Any) -> float:
            return float(await function(task))

    return Wrapped()


async def enqueue(store: LightningStoreClient, count: int) -> None:
    """Queues rollouts, sixteen requests at once."""
    limit = asyncio.Semaphore(16)

    async def one() -> None:
        async with limit:
            await store.enqueue_rollout(input={"question": "What is 17 + 25?"})

    await asyncio.gather(*(one() for _ in range(count)))


async def run(url: str, worker: int, agent: str, count: int) -> dict[str, float]:
    """Runs rollouts; returns when the first began, when the last ended, and the CPU in between, seconds."""
    store = LightningStoreClient(url)
    if agent == "enqueue":
        await store.update_resources("resources", {})
        await enqueue(store, count)
        await store.close()
        return {}
    runner: LitAgentRunner[Any] = LitAgentRunner(
        tracer=OtelTracer(), max_rollouts=count, poll_interval=POLL_S, interval_jitter=0.01
    )
    runner.init(agent_named(agent))
    runner.init_worker(worker, store)
    cpu, started = time.process_time(), time.time()
    await runner.iter()
    measured = {"started": started, "ended": time.time(), "cpu_s": time.process_time() - cpu}
    runner.teardown_worker(worker)
    runner.teardown()
    await store.close()
    return measured


if __name__ == "__main__":
    result = asyncio.run(run(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
    # Its threads do not all end by themselves.
    os._exit(0)
