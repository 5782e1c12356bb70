"""The caller of a model, and its attempt."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from fulmen_service_kit.security.call_terms import NO_TERMS, CallTerms
from fulmen_service_kit.security.tokens import Caller as TokenCaller


class Attribution(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt that a call belongs to.

    Attributes:
        attempt: `projects/{p}/rollouts/{r}/attempts/{n}`.
        epoch: fencing epoch of the attempt's lease.
        mode: "train", "validation" or "test".
        expires_s: Unix time at which its key expires, seconds.
        leased_s: Unix time at which its key was made, seconds; 0 if the call names its attempt in the URL.
        terms: what limits its calls.
    """

    attempt: str
    project: str
    epoch: int
    mode: str
    expires_s: float = math.inf
    leased_s: float = 0.0
    terms: CallTerms = NO_TERMS


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """The caller of a model.

    Attributes:
        project: project that the call is made for: its limits apply.
        models_of: project whose models it may call; `ALL_PROJECTS` for a token of all projects that names none.
        attribution: the attempt that the call belongs to; None if the caller is not an attempt.
        key_id: id of its token; empty for an attempt key.
    """

    project: str
    models_of: str
    attribution: Attribution | None
    key_id: str = ""

    def subjects(self) -> Iterator[str]:
        """Yields whose budgets pay for its calls, as in `SpendBudget.subject`."""
        terms = NO_TERMS if self.attribution is None else self.attribution.terms
        yield "project"
        if self.key_id:
            yield f"key/{self.key_id}"
        if terms.training_run:
            yield f"run/{terms.training_run.rpartition('/')[2]}"
        if terms.agent.startswith("resources/"):
            yield f"agent/{terms.agent.split('/')[1]}"

    @property
    def attempt(self) -> str:
        """Name of its attempt; empty if it is none."""
        return "" if self.attribution is None else self.attribution.attempt


def caller_of(token: TokenCaller, project: str = "") -> Caller:
    """Returns the caller that a token names, with the attempt if it is an attempt key.

    Args:
        token: the token.
        project: project that the call is made for, one of the token's; empty if the call names none.
    """
    attribution = None
    if token.attempt is not None:
        attribution = Attribution(
            attempt=str(token.attempt),
            project=token.project,
            epoch=token.epoch,
            mode=token.mode,
            expires_s=token.expires_s,
            leased_s=token.issued_s,
            terms=token.terms,
        )
    return Caller(
        project=project or token.own_project,
        models_of=project or token.project,
        attribution=attribution,
        key_id=token.token_id,
    )
