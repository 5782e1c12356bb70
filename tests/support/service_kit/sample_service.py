"""A service of the smallest size, run as a process by the tests of the lifecycle."""

import asyncio
import time
from contextlib import AsyncExitStack

from fulmen.store.v1 import rollout_service_pb2 as pb
from fulmen.store.v1 import rollout_service_pb2_grpc as rpc
from fulmen_service_kit.cli import service_cli
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.rpc.server import build_server
from fulmen_service_kit.security.tokens import TokenVerifier
from fulmen_service_kit.settings import KeyHolderSettings, ServiceSettings, settings_config

BLOCK_S = 0.3
SERVICE = "fulmen.store.v1.RolloutService"


class SampleSettings(KeyHolderSettings):
    """Settings of the sample."""

    service_name = "sample"
    model_config = settings_config("FULMEN_SAMPLE_")


class SampleServicer(rpc.RolloutServiceServicer):
    """Answers one rpc; another makes the background role fail, a third blocks the event loop."""

    def __init__(self) -> None:
        self.fail = asyncio.Event()

    async def GetRollout(self, request: pb.GetRolloutRequest, context: object) -> pb.GetRolloutResponse:
        """Answers with nothing."""
        return pb.GetRolloutResponse()

    async def CancelRollouts(self, request: pb.CancelRolloutsRequest, context: object) -> pb.CancelRolloutsResponse:
        """Makes the role fail."""
        self.fail.set()
        return pb.CancelRolloutsResponse()

    async def ListRollouts(self, request: pb.ListRolloutsRequest, context: object) -> pb.ListRolloutsResponse:
        """Blocks the event loop."""
        time.sleep(BLOCK_S)  # noqa: ASYNC251  (a block is wanted)
        return pb.ListRolloutsResponse()


class Failing:
    """A background role that raises on an event."""

    def __init__(self, fail: asyncio.Event) -> None:
        self._fail = fail

    async def run(self) -> None:
        """Waits, then raises."""
        await self._fail.wait()
        raise RuntimeError("as requested")


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Puts the sample together."""
    assert isinstance(settings, SampleSettings)  # The command line reads this class.
    servicer = SampleServicer()
    server = build_server(
        settings,
        verifier=TokenVerifier(settings.signing_keys()),
        service_names=[SERVICE],
        register=lambda server: rpc.add_RolloutServiceServicer_to_server(servicer, server),
    )
    return ServiceParts(server=server, roles={"failing": Failing(servicer.fail)})


if __name__ == "__main__":
    service_cli(SampleSettings, build)()
