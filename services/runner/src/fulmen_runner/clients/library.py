"""Fetches agents and their files from the store."""

from google.protobuf.message import DecodeError

from fulmen.errors import ArgumentInvalid, FulmenError, ResourceNotFound
from fulmen.rpc.channel import FulmenChannel
from fulmen.runner.v1.agent_spec_pb2 import AgentSpec, CommandEntry, Grader, PythonEntry
from fulmen.store.v1 import resource_service_pb2, resource_service_pb2_grpc
from fulmen.store.v1.resource_pb2 import ResourceVersion
from fulmen_runner.agents.specification import Bundle, CommandTarget, PythonTarget, Specification, Target
from fulmen_runner.domain.errors import AgentFailed, ProgramUnavailable

FETCH_DEADLINE_S = 30.0


class StoreLibrary:
    """The store's resources, as specifications and bundles."""

    def __init__(self, channel: FulmenChannel) -> None:
        self._stub = resource_service_pb2_grpc.ResourceServiceStub(channel)

    async def specification(self, name: str, project: str) -> Specification:
        """Returns a version of an agent.

        Raises:
            AgentFailed: If it does not exist or says nothing sensible.
            ProgramUnavailable: If the store cannot be reached.
        """
        resource = await self._fetch(name, project)
        try:
            spec = AgentSpec.FromString(resource.content)
        except DecodeError:
            raise AgentFailed(f"{name} is not an agent specification.") from None
        entry = _target(spec)
        if entry is None:
            raise AgentFailed(f"{name} does not say how the agent is started.")
        return Specification(
            bundle=spec.bundle, entry=entry, grader=_target(spec.grader), environment=dict(spec.environment)
        )

    async def bundle(self, name: str, project: str) -> Bundle:
        """Returns a version of a bundle.

        Raises:
            AgentFailed: If it does not exist.
            ProgramUnavailable: If the store cannot be reached.
        """
        resource = await self._fetch(name, project)
        return Bundle(archive=resource.content, sha256_hex=resource.sha256.hex())

    async def _fetch(self, name: str, project: str) -> ResourceVersion:
        request = resource_service_pb2.GetResourcesRequest(names=[name], project=project)
        try:
            answer = await self._stub.GetResources(request, timeout=FETCH_DEADLINE_S)
        except (ResourceNotFound, ArgumentInvalid) as error:
            raise AgentFailed(f"{name} cannot be fetched: {error}") from None
        except FulmenError as error:
            raise ProgramUnavailable(f"{name} cannot be fetched now: {error.message}") from None
        return answer.resources[0]


def _target(holder: AgentSpec | Grader) -> Target | None:
    match holder.WhichOneof("entry"):
        case "python":
            return _python(holder.python)
        case "command":
            return _command(holder.command)
        case _:
            return None


def _python(entry: PythonEntry) -> PythonTarget:
    return PythonTarget(target=entry.target)


def _command(entry: CommandEntry) -> CommandTarget:
    return CommandTarget(argv=tuple(entry.argv), output_kept_bytes=entry.max_output_bytes)
