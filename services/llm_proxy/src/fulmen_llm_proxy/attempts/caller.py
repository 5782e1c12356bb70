"""Who makes a call, and for which attempt."""

from __future__ import annotations

import math

import msgspec

from fulmen_service_kit.tokens import Caller as TokenCaller


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt that a call belongs to, as its attempt key says.

    Attributes:
        attempt: `rollouts/{rollout}/attempts/{n}`.
        epoch: fencing epoch of the attempt's lease.
        mode: "train", "validation" or "test".
        expires_s: Unix time after which its key is no longer good.
        token_budget: how many tokens its calls may use; 0: what the project says.
    """

    attempt: str
    project: str
    epoch: int
    mode: str
    expires_s: float = math.inf
    token_budget: int = 0


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who makes a call.

    Attributes:
        attribution: the attempt that the call belongs to; None for everybody but an agent.
    """

    project: str
    attribution: Attribution | None


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
