"""The parts of the algorithm service and how they are joined."""

from contextlib import AsyncExitStack
from datetime import UTC, datetime

import grpc.aio
from transformers.utils import logging as transformers_logging

from fulmen.algorithm.v1.training_run_service_pb2_grpc import add_TrainingRunServiceServicer_to_server
from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen_algorithm.algorithms.registry import ALGORITHMS
from fulmen_algorithm.clients.engine_inside import start_engine_inside
from fulmen_algorithm.clients.engine_process import EngineOptions, EngineProcess
from fulmen_algorithm.clients.engine_supervisor import EngineSupervisor
from fulmen_algorithm.clients.model_builder import ModelBuilder
from fulmen_algorithm.clients.patience import Notify, Patience
from fulmen_algorithm.clients.proxy import ProxyAdmin
from fulmen_algorithm.clients.store import RolloutRequest, StoreQueue, StoreResources
from fulmen_algorithm.domain.algorithm import AlgorithmSettings
from fulmen_algorithm.domain.execution import Connections, RunExecutor
from fulmen_algorithm.domain.run import TrainingRun
from fulmen_algorithm.domain.runs import Runs
from fulmen_algorithm.domain.torch_thread import TorchThread
from fulmen_algorithm.domain.worker import RunWorker
from fulmen_algorithm.persistence.state_folder import StateFolder
from fulmen_algorithm.settings import AlgorithmServiceSettings
from fulmen_algorithm.transport.training_runs import TrainingRunServicer
from fulmen_service_kit.auth import RolePolicy
from fulmen_service_kit.lifecycle import Role as BackgroundRole
from fulmen_service_kit.lifecycle import ServiceParts
from fulmen_service_kit.revocation import RevocationFollower, RevokedTokens, revoked_at_store
from fulmen_service_kit.server import build_server
from fulmen_service_kit.settings import ServiceSettings
from fulmen_service_kit.tokens import Role, TokenSigner

TRAINING_RUN_SERVICE = "fulmen.algorithm.v1.TrainingRunService"
SERVICE_TOKEN_TTL_S = 365 * 86400.0
ENGINE_KEY_NAME = "engine"
READS = ("GetTrainingRun", "ListTrainingRuns", "WatchTrainingRun", "ListCheckpoints", "GetTrainingRunReport")
POLICY = RolePolicy(
    services={TRAINING_RUN_SERVICE: frozenset({Role.CLIENT, Role.SERVICE})},
    rpcs={f"/{TRAINING_RUN_SERVICE}/{rpc}": frozenset({Role.CLIENT, Role.SERVICE, Role.READER}) for rpc in READS},
)


async def build(settings: ServiceSettings, stack: AsyncExitStack) -> ServiceParts:
    """Makes the service's parts; see `fulmen_service_kit.lifecycle`.

    Raises:
        StartupError: if the port is in use, or another process works on the state folder.
        TypeError: if the settings are another service's.
    """
    if not isinstance(settings, AlgorithmServiceSettings):
        raise TypeError("The algorithm service needs AlgorithmServiceSettings.")
    transformers_logging.disable_progress_bar()
    state = stack.enter_context(StateFolder(settings.state_dir))
    token = _token(settings)
    store = await stack.enter_async_context(open_channel(settings.store_target, token=token))
    proxy = await stack.enter_async_context(open_channel(settings.llm_proxy_target, token=token))
    torch_thread = TorchThread(torch_threads=settings.torch_threads)
    stack.callback(torch_thread.close)
    runs = Runs(open_file=state.run_files, clock=_now)
    for run, files in state.runs():
        runs.adopt(run, files)
    supervisor = EngineSupervisor(
        _engine_options(settings),
        ProxyAdmin(
            proxy,
            backend_id=settings.engine_backend,
            key_name=ENGINE_KEY_NAME if settings.engine_token.get_secret_value() else "",
        ),
        outage_limit_s=settings.outage_limit_s,
        start=start_engine_inside if settings.engine_in_process else EngineProcess.start,
    )
    connections = _connections(settings, store, supervisor)
    executor = RunExecutor(
        registry=ALGORITHMS,
        runs=runs,
        connections=connections,
        open_folder=state.run_files,
        torch_thread=torch_thread,
        device=settings.device,
        keep_checkpoints=settings.keep_checkpoints,
        keep_models=settings.keep_models,
    )
    worker = RunWorker(runs, executor)
    servicer = TrainingRunServicer(
        runs=runs, worker=worker, registry=ALGORITHMS, shelf=connections.shelf, open_files=state.run_files, clock=_now
    )

    def register(server: grpc.aio.Server) -> None:
        add_TrainingRunServiceServicer_to_server(servicer, server)

    revoked = RevokedTokens()
    server = build_server(
        settings,
        policy=POLICY,
        service_names=(TRAINING_RUN_SERVICE,),
        register=register,
        revoked=revoked,
    )

    async def drain() -> None:
        servicer.drain()
        await worker.drain()

    roles: dict[str, BackgroundRole] = {
        "run_worker": worker,
        "engine_supervisor": supervisor,
        "revocations": RevocationFollower(revoked=revoked, fetch=revoked_at_store(store)),
    }
    return ServiceParts(server=server, roles=roles, drain=drain)


def _connections(settings: AlgorithmServiceSettings, store: FulmenChannel, supervisor: EngineSupervisor) -> Connections:
    def patience(notify: Notify) -> Patience:
        return Patience(service="store", notify=notify, limit_s=settings.outage_limit_s)

    def queue(run: TrainingRun, run_settings: AlgorithmSettings, notify: Notify) -> StoreQueue:
        limits = run_settings.rollout_limits
        request = RolloutRequest(
            project=run.project,
            training_run=run.name,
            agent=run.inputs.get("agent", ""),
            attempt_timeout_s=limits.timeout_s,
            max_attempts=limits.attempts,
        )
        return StoreQueue(store, request, patience(notify))

    builder = ModelBuilder(deadline_s=settings.build_deadline_s, torch_threads=settings.torch_threads)
    return Connections(
        queue=queue,
        shelf=lambda project, notify: StoreResources(store, project, patience(notify)),
        serving=supervisor,
        build_model=builder.build,
    )


def _engine_options(settings: AlgorithmServiceSettings) -> EngineOptions:
    return EngineOptions(
        host=settings.engine_host,
        advertise_host=settings.engine_advertise_host,
        port=settings.engine_port,
        token=settings.engine_token.get_secret_value(),
        torch_threads=settings.torch_threads,
        device=settings.device,
        max_batch_size=settings.engine_max_batch_size,
    )


def _token(settings: AlgorithmServiceSettings) -> str | None:
    if settings.token.get_secret_value():
        return settings.token.get_secret_value()
    key = settings.signing_key.get_secret_value()
    return TokenSigner(key).issue(Role.SERVICE, subject="algorithm", ttl_s=SERVICE_TOKEN_TTL_S) if key else None


def _now() -> datetime:
    return datetime.now(UTC)
