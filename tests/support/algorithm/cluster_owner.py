"""Starts a group on a cluster of a kind, prints its process ids, and waits to be killed."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping

from tests.support.algorithm.clusters import Calls, cluster_of, order_of


async def own(kind: str, engine: Mapping[str, str]) -> None:
    async with cluster_of(kind, engine) as cluster:
        calls = Calls(2)
        await cluster.start(order_of(2), calls.welcome)
        print(*(note["pid"] for note in await calls.all()), flush=True)
        await asyncio.sleep(3600)


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1], json.loads(sys.argv[2])))
