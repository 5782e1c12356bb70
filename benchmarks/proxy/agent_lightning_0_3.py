"""Agent Lightning 0.3.0's LLMProxy with its in-memory store; runs inside its own virtual environment.

`python agent_lightning_0_3.py PORT STORE_PORT BACKEND READY_FILE` writes the path for calls of one attempt.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from agentlightning import LLMProxy
from agentlightning.store import InMemoryLightningStore, LightningStoreServer


async def run(port: int, store_port: int, backend: str, ready: Path) -> None:
    """Serves until the process is terminated."""
    store = LightningStoreServer(
        InMemoryLightningStore(thread_safe=True), host="127.0.0.1", port=store_port, launch_mode="thread"
    )
    await store.start()
    rollout = await store.start_rollout(input={"question": "benchmark"})
    parameters = {"model": "openai/canned", "api_base": f"http://{backend}/v1", "api_key": "none"}
    proxy = LLMProxy(
        host="127.0.0.1",
        port=port,
        model_list=[{"model_name": "canned", "litellm_params": parameters}],
        store=store,
        launch_mode="mp",
    )
    await proxy.start()
    path = f"/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}/v1/chat/completions"
    partial = ready.with_suffix(".partial")
    partial.write_text(path)
    partial.rename(ready)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
