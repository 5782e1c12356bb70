"""Tokens of engines that the service starts on clusters, got from the store."""

from functools import partial

from fulmen.ids import parse_training_run_name
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import project_service_pb2 as pb
from fulmen.store.v1 import project_service_pb2_grpc
from fulmen_algorithm.clients.patience import Notify, Patience

LIMIT_S = 5.0


class EngineTokens:
    """Issues tokens of role engine, each for one run; their holders refresh them."""

    def __init__(self, channel: FulmenChannel, *, outage_limit_s: float) -> None:
        """Initializes the client.

        Args:
            channel: Channel to the store; it carries the service's own token.
            outage_limit_s: Maximum wait for the store, in seconds.
        """
        self._projects = project_service_pb2_grpc.ProjectServiceStub(channel)
        self._outage_limit_s = outage_limit_s

    async def issue(self, run: str, engine_id: str, notify: Notify) -> str:
        """Issues the token of an engine.

        Args:
            run: The run that it serves, `projects/{project}/trainingRuns/{id}`.
            engine_id: Its id among the engines of the run.
            notify: Receives notices about waits for the store.

        Raises:
            Unavailable: if the store has not answered within the limit.
            FulmenError: if it refuses.
        """
        request = pb.IssueTokenRequest(
            project=parse_training_run_name(run).project,
            role=pb.TOKEN_ROLE_ENGINE,
            subject=engine_id,
            training_run=run,
        )
        patience = Patience(service="store", notify=notify, limit_s=self._outage_limit_s)
        answer = await patience.call(partial(self._projects.IssueToken, request, timeout=LIMIT_S))
        return str(answer.token)
