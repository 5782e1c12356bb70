"""A server of gradient sums as a process of its own, for runs whose ranks exchange through it.

python -m benchmarks.reliability.aggregator PORT FOLDER
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import torch

from fulmen_algorithm.app import GRADIENT_EXCHANGE_SERVICE
from fulmen_exchange.server.runs import OpenRuns
from fulmen_exchange.server.servicer import GradientExchangeServicer, add_exchange
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.tokens import TokenVerifier
from fulmen_service_kit.settings import KeyHolderSettings, settings_config


class AggregatorSettings(KeyHolderSettings):
    """Those that every service has."""

    service_name = "matrix-aggregator"
    model_config = settings_config("FULMEN_MATRIX_AGGREGATOR_")


async def serve(folder: Path) -> None:
    """Serves until it is killed."""
    torch.set_num_threads(1)
    servicer = GradientExchangeServicer(runs=OpenRuns(), folder=folder)
    settings = AggregatorSettings.from_environment()
    made = build_server(
        settings,
        verifier=TokenVerifier(settings.signing_keys()),
        service_names=[GRADIENT_EXCHANGE_SERVICE],
        register=lambda server: add_exchange(servicer, server),
    )
    await made.server.start()
    await servicer.run()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
