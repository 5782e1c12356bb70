"""Authentication by the token in the request's headers."""

from __future__ import annotations

import structlog

from fulmen.errors import TokenInvalid
from fulmen.ids import ALL_PROJECTS
from fulmen_llm_proxy.calls.failures import Refused
from fulmen_llm_proxy.metrics.keys import KeyMetrics
from fulmen_service_kit.http.wire import Scope, client_address
from fulmen_service_kit.security.permissions import MODEL_CALL, MODEL_CALL_FOR_ATTEMPT, require
from fulmen_service_kit.security.project_limits import ProjectLimits, ProjectShare
from fulmen_service_kit.security.token_buckets import TokenBuckets
from fulmen_service_kit.security.tokens import FORGED, MALFORMED, Role, TokenVerifier
from fulmen_service_kit.security.tokens import Caller as TokenCaller

_HEADERS = (b"authorization", b"x-api-key", b"api-key")

_log = structlog.get_logger(__name__)


class HttpAuthenticator:
    """Verifies `Authorization: Bearer <token>` (OpenAI), `x-api-key` (Anthropic) or `api-key` (Azure)."""

    def __init__(
        self,
        *,
        verifier: TokenVerifier,
        forged_keys: TokenBuckets,
        metrics: KeyMetrics,
        dev_mode: bool,
        limits: ProjectLimits,
    ) -> None:
        self._verifier = verifier
        self._forged_keys = forged_keys
        self._metrics = metrics
        self._dev_mode = dev_mode
        self._limits = limits

    async def authenticate(self, scope: Scope) -> TokenCaller:
        """Returns the caller that the token names. A refusal comes late.

        Raises:
            TokenInvalid: if there is no valid token.
            Unavailable: if it may be valid, but the store's keys have not been read yet.
            Refused: if too many forged tokens came from this address.
        """
        try:
            return await self._verified(scope)
        except TokenInvalid as error:
            await self._refuse(error, scope)
            raise

    async def _verified(self, scope: Scope) -> TokenCaller:
        token = _token(scope)
        if not token and self._dev_mode:
            return TokenCaller(role=Role.ADMIN, subject="dev_mode", project=ALL_PROJECTS)
        await self._verifier.prepare(token)
        return self._verifier.verify(token)

    async def admit(self, caller: TokenCaller) -> ProjectShare:
        """Counts a call of the caller's project, until the share's context ends.

        Raises:
            QuotaExceeded: if a limit of the project is exhausted.
        """
        return await self._limits.admit(caller)

    def authorize(self, caller: TokenCaller, *, for_attempt: bool) -> None:
        """Checks that a caller may call models.

        Args:
            caller: the caller.
            for_attempt: whether the request names an attempt; then a runner's token is accepted, too.

        Raises:
            PermissionDenied: if the token's role may not.
        """
        require(caller, MODEL_CALL_FOR_ATTEMPT if for_attempt else MODEL_CALL)

    async def hold(self, scope: Scope) -> None:
        """Waits before a request is refused whose caller no token names: the longer, the more its address has sent."""
        await self._limits.refusals.hold(client_address(scope))

    async def _refuse(self, error: TokenInvalid, scope: Scope) -> None:
        problem = error.metadata.get("problem", "")
        self._metrics.keys_refused.labels(problem).inc()
        address = client_address(scope)
        wait_s = self._forged_keys.take(address) if problem == FORGED else 0.0
        if wait_s and not self._limits.refusals.is_holding(address):
            _log.warning("too_many_forged_keys", address=address)
        await self._limits.refusals.hold(address)
        if wait_s:
            raise Refused(
                429, "too_many_bad_keys", "Too many forged keys from this address.", retry_after_s=wait_s
            ) from error


def _token(scope: Scope) -> str:
    given: dict[bytes, bytes] = {}
    several: set[bytes] = set()
    for name, value in scope["headers"]:
        if name in _HEADERS:
            if name in given:
                several.add(name)
            else:
                given[name] = value
    if several:
        name = next(name for name in _HEADERS if name in several)
        raise TokenInvalid(f"The request has several {name.decode()} headers: send one.", problem=MALFORMED)
    for name in _HEADERS:
        if value := given.get(name, b""):
            return _bearer(value) if name == b"authorization" else value.decode("latin-1").strip()
    return ""


def _bearer(value: bytes) -> str:
    scheme, _, token = value.partition(b" ")
    if scheme.lower() != b"bearer":
        raise TokenInvalid("The authorization header must be of the form `Bearer <token>`.")
    return token.decode("latin-1").strip()
