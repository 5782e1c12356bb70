"""Who calls, as the calls know it: the same over HTTP and over gRPC."""

from __future__ import annotations

from fulmen_llm_proxy.capture.finished_call import Attribution, Caller
from fulmen_service_kit.tokens import Caller as TokenCaller


def caller_of(token: TokenCaller) -> Caller:
    """Returns who calls, and the attempt that the calls belong to; None for everybody but an agent."""
    attribution = None
    if token.attempt is not None:
        attribution = Attribution(
            attempt=str(token.attempt),
            project=token.project,
            epoch=token.epoch,
            mode=token.mode,
            expires_s=token.expires_s,
            token_budget=token.token_budget,
        )
    return Caller(project=token.own_project, attribution=attribution)
