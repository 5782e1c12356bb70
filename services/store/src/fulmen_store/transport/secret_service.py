"""`SecretService` over gRPC."""

from __future__ import annotations

import contextlib
from typing import Final
from uuid import UUID

import grpc.aio
from google.protobuf.message import DecodeError

from fulmen.errors import LeaseLost, ResourceNotFound
from fulmen.ids import AttemptName, parse_attempt_name
from fulmen.runner.v1.agent_spec_pb2 import AgentSpec
from fulmen.secret_names import MAX_AGENT_SECRETS, is_backend_key
from fulmen.store.v1 import rollout_pb2, secret_service_pb2_grpc
from fulmen.store.v1 import secret_service_pb2 as pb
from fulmen_service_kit.security.auth import current_caller, require_project
from fulmen_service_kit.security.permissions import SET_BACKEND_KEY, require
from fulmen_service_kit.security.sealing import Sealer
from fulmen_store.database.stored import read_column
from fulmen_store.projects.names import NO_PROJECT, ProjectNames
from fulmen_store.resources.table import ResourceTable
from fulmen_store.resources.versions import parse_ref
from fulmen_store.sealed_secrets.sealed_secrets import NewSecret, Secrets
from fulmen_store.sealed_secrets.table import SecretTable, SecretView

__all__ = ["SecretService"]

AGENT: Final = "agent"


class SecretService(secret_service_pb2_grpc.SecretServiceServicer):
    """Serves secrets."""

    def __init__(
        self,
        *,
        secrets: Secrets,
        table: SecretTable,
        resources: ResourceTable,
        projects: ProjectNames,
        proxy_sealer: Sealer,
    ) -> None:
        """Creates the servicer; `proxy_sealer` seals what only the LLM proxy opens."""
        self._secrets = secrets
        self._table = table
        self._resources = resources
        self._projects = projects
        self._proxy_sealer = proxy_sealer

    async def SetSecret(self, request: pb.SetSecretRequest, context: grpc.aio.ServicerContext) -> pb.SetSecretResponse:
        """Sets a secret."""
        project = _writable(request.project, request.name)
        new = NewSecret(
            project_id=await self._projects.require(project),
            project=project,
            name=request.name,
            value=request.value,
            hosts=tuple(request.hosts),
        )
        return pb.SetSecretResponse(secret=_message(await self._secrets.set(new)))

    async def ListSecrets(
        self, request: pb.ListSecretsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListSecretsResponse:
        """Lists a project's secrets without values."""
        project_id = await self._projects.require(require_project(request.project))
        return pb.ListSecretsResponse(secrets=[_message(view) for view in await self._table.list_all(project_id)])

    async def DeleteSecret(
        self, request: pb.DeleteSecretRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteSecretResponse:
        """Deletes a secret."""
        project = _writable(request.project, request.name)
        await self._secrets.delete(await self._projects.require(project), request.name)
        return pb.DeleteSecretResponse()

    async def GetAttemptSecrets(
        self, request: pb.GetAttemptSecretsRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetAttemptSecretsResponse:
        """Returns what the agent of a leased attempt names."""
        name = parse_attempt_name(request.attempt, field="attempt")
        project_id, rollout = await self._leased(name, request.lease_id)
        names = await self._named(project_id, rollout.agent)
        values = await self._secrets.values(project_id, name.project, names) if names else {}
        return pb.GetAttemptSecretsResponse(values=values)

    async def GetBackendKeys(
        self, request: pb.GetBackendKeysRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetBackendKeysResponse:
        """Returns the keys of a project's backends, sealed for the proxy."""
        project = require_project(request.project)
        project_id = await self._projects.require(project)
        found = await self._secrets.backend_keys(project_id, project, sealer=self._proxy_sealer)
        keys = [pb.SealedKey(name=each.name, hosts=each.hosts, sealed=each.sealed) for each in found]
        return pb.GetBackendKeysResponse(keys=keys)

    async def _leased(self, name: AttemptName, lease_id: str) -> tuple[int, rollout_pb2.Rollout]:
        """Returns the project and the request of an attempt.

        Raises:
            LeaseLost: If the lease is not held, or the caller may not access the project.
        """
        project_id = (
            await self._projects.find(name.project) if current_caller().may_access(name.project) else NO_PROJECT
        )
        found = None
        with contextlib.suppress(ValueError):
            found = await self._table.leased_request(project_id, name.rollout_id, UUID(lease_id), name.number)
        if found is None:
            raise LeaseLost("The runner does not hold this lease.")
        return project_id, read_column(rollout_pb2.Rollout, found) or rollout_pb2.Rollout()

    async def _named(self, project_id: int, agent: str) -> list[str]:
        """Returns the secrets that a version of an agent names; none if it is not readable, which runners report."""
        if not agent:
            return []
        try:
            version = await self._resources.get(project_id, agent, parse_ref(agent, field="agent"))
            spec = AgentSpec.FromString(version.content) if version.kind == AGENT else AgentSpec()
        except (ResourceNotFound, DecodeError):
            return []
        return list(spec.secrets[:MAX_AGENT_SECRETS])


def _writable(project: str, name: str) -> str:
    """Returns the project of a secret that the caller may set or delete.

    Raises:
        PermissionDenied: If it may not.
    """
    project = require_project(project)
    if is_backend_key(name):
        require(current_caller(), SET_BACKEND_KEY, project)
    return project


def _message(view: SecretView) -> pb.Secret:
    message = pb.Secret(name=view.name, hosts=view.hosts)
    message.create_time.FromDatetime(view.created_at)
    message.update_time.FromDatetime(view.updated_at)
    return message
