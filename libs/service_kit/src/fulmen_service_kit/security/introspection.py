"""Token introspection (RFC 7662): verification by the store, for a service that must not hold the signing key.

A runner executes untrusted code. An attacker who takes it over finds the runner's token, but cannot create others.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.errors import TokenInvalid
from fulmen.ids import ALL_PROJECTS
from fulmen.rpc.channel import FulmenChannel
from fulmen.store.v1 import project_service_pb2 as pb
from fulmen.store.v1 import project_service_pb2_grpc
from fulmen_service_kit.security.tokens import FORGED, MISSING, Caller, Role, TokenVerifier

KEEP_S: Final = 3.0
"""Time for which an answer is cached; a revoked token must be rejected everywhere within five seconds."""

LIMIT_S: Final = 5.0
MAX_KEPT: Final = 1024
ROLES: Final = {
    pb.TOKEN_ROLE_ADMIN: Role.ADMIN,
    pb.TOKEN_ROLE_SERVICE: Role.SERVICE,
    pb.TOKEN_ROLE_RUNNER: Role.RUNNER,
    pb.TOKEN_ROLE_CLIENT: Role.CLIENT,
    pb.TOKEN_ROLE_READER: Role.READER,
    pb.TOKEN_ROLE_ENGINE: Role.ENGINE,
    pb.TOKEN_ROLE_RANK: Role.RANK,
}
ROLE_NUMBERS: Final = {role: number for number, role in ROLES.items()}


def introspected(verifier: TokenVerifier, token: str, *, asked_by: Caller) -> pb.IntrospectTokenResponse:
    """Returns the introspection of a token.

    Args:
        verifier: Verifies the token with the keys.
        token: The token.
        asked_by: The caller; tokens of projects that it may not access are reported as forged.
    """
    try:
        caller = verifier.verify(token)
    except TokenInvalid as error:
        return pb.IntrospectTokenResponse(problem=error.metadata.get("problem", FORGED))
    is_seen = caller.project == ALL_PROJECTS or asked_by.may_access(caller.project)
    if caller.role is Role.ATTEMPT or not is_seen:
        return pb.IntrospectTokenResponse(problem=FORGED)
    info = pb.TokenInfo(
        token_id=caller.token_id,
        project=caller.project,
        role=ROLE_NUMBERS[caller.role],
        subject=caller.subject,
        expire_time=Timestamp(seconds=int(caller.expires_s)),
    )
    return pb.IntrospectTokenResponse(active=True, info=info)


class StoreVerifier:
    """A verifier that asks the store."""

    def __init__(self, channel: FulmenChannel, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Initializes the verifier; `channel` carries the service's own token."""
        self._projects = project_service_pb2_grpc.ProjectServiceStub(channel)
        self._clock = clock
        self._answers: OrderedDict[str, tuple[float, pb.IntrospectTokenResponse]] = OrderedDict()

    async def prepare(self, token: str) -> None:
        """Introspects a token unless the answer is cached.

        Raises:
            Unavailable, DeadlineExceeded: If the store does not answer.
        """
        known = self._answers.get(token)
        if not token or (known is not None and known[0] > self._clock()):
            return
        answer = await self._projects.IntrospectToken(pb.IntrospectTokenRequest(token=token), timeout=LIMIT_S)
        self._answers[token] = (self._clock() + KEEP_S, answer)
        self._answers.move_to_end(token)
        if len(self._answers) > MAX_KEPT:
            self._answers.popitem(last=False)

    def verify(self, token: str) -> Caller:
        """Returns the caller from the store's answer.

        Raises:
            TokenInvalid: If the token is not valid.
        """
        if not token:
            raise TokenInvalid("A token is required: send `authorization: Bearer <token>`.", problem=MISSING)
        answer = self._answers[token][1]
        if not answer.active:
            raise TokenInvalid("token is invalid", problem=answer.problem)
        info = answer.info
        return Caller(
            role=ROLES[info.role],
            subject=info.subject,
            project=info.project,
            token_id=info.token_id,
            expires_s=float(info.expire_time.seconds),
        )

    def check(self, caller: Caller) -> None:
        """Does nothing: rpcs of such services are short."""
