"""The part of a store that other services follow: its published keys, revoked tokens and time. On a real socket."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from fulmen.store.v1 import project_service_pb2 as pb
from fulmen.store.v1 import project_service_pb2_grpc
from fulmen_service_kit.security.keys import StoreKeys, key_id
from fulmen_service_kit.security.tokens import TokenSigner, TokenVerifier


class KeyService(project_service_pb2_grpc.ProjectServiceServicer):
    """What followers call.

    Attributes:
        keys: The keys; may be replaced.
        revoked: Ids of revoked tokens.
        ahead_s: How far its clock is ahead of this machine's, seconds.
        refreshed: Ids of the tokens that were refreshed.
    """

    def __init__(self, signing_keys: str, *, revoked: Iterable[str] = ()) -> None:
        self.keys = StoreKeys(signing_keys)
        self.revoked = list(revoked)
        self.ahead_s = 0.0
        self.refreshed: list[str] = []
        self.polls = 0

    async def ListSigningKeys(self, request: pb.ListSigningKeysRequest, context: Any) -> pb.ListSigningKeysResponse:
        self.polls += 1
        keys = [pb.SigningKey(key_id=key_id(each), public_key=each) for each in self.keys.published()]
        answer = pb.ListSigningKeysResponse(keys=keys)
        answer.server_time.FromNanoseconds(time.time_ns() + int(self.ahead_s * 1e9))
        return answer

    async def ListRevokedTokens(
        self, request: pb.ListRevokedTokensRequest, context: Any
    ) -> pb.ListRevokedTokensResponse:
        return pb.ListRevokedTokensResponse(token_ids=self.revoked)

    async def RefreshToken(self, request: pb.RefreshTokenRequest, context: Any) -> pb.RefreshTokenResponse:
        shown = dict(context.invocation_metadata())["authorization"].removeprefix("Bearer ")
        caller = TokenVerifier(self.keys).verify(shown)
        self.refreshed.append(caller.token_id)
        ttl_s = caller.expires_s - caller.issued_s
        token = TokenSigner(self.keys).issue(
            caller.role,
            subject=caller.subject,
            ttl_s=ttl_s,
            project=request.project or caller.project,
            token_id=caller.token_id,
            training_run=caller.training_run,
        )
        answer = pb.RefreshTokenResponse(token=token)
        answer.expire_time.FromSeconds(int(time.time() + ttl_s))
        return answer


@asynccontextmanager
async def serving_keys(service: KeyService) -> AsyncIterator[str]:
    """Serves it until the block ends; yields its address."""
    server = grpc.aio.server()
    project_service_pb2_grpc.add_ProjectServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
