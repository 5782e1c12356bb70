"""A server of shards of sums, with the servicer of the algorithm service; one stands beside each rank.

    python -m benchmarks.exchange.server ADDRESS

prints its port, and ends when its input does.
"""

from __future__ import annotations

import asyncio
import sys

import torch

from benchmarks.exchange.rank import own_output
from fulmen_algorithm.app import GRADIENT_EXCHANGE_SERVICE
from fulmen_exchange.server.runs import OpenRuns
from fulmen_exchange.server.servicer import GradientExchangeServicer, add_exchange
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.tokens import TokenVerifier
from fulmen_service_kit.settings import KeyHolderSettings, settings_config


class ShardServerSettings(KeyHolderSettings):
    """Those that every service has."""

    service_name = "exchange-benchmark"
    model_config = settings_config("FULMEN_EXCHANGE_BENCHMARK_")


async def serve() -> None:
    """Serves until standard input ends."""
    said = own_output()
    torch.set_num_threads(1)
    servicer = GradientExchangeServicer(runs=OpenRuns())
    settings = ShardServerSettings(**(ShardServerSettings.environment_values() | {"host": sys.argv[1]}))
    made = build_server(
        settings,
        verifier=TokenVerifier(settings.signing_keys()),
        service_names=[GRADIENT_EXCHANGE_SERVICE],
        register=lambda server: add_exchange(servicer, server),
    )
    await made.server.start()
    passing = asyncio.create_task(servicer.run(), name="time")
    said.write(f"{made.port}\n")
    said.flush()
    await asyncio.to_thread(sys.stdin.read)
    passing.cancel()
    await asyncio.gather(passing, return_exceptions=True)
    await made.server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve())
