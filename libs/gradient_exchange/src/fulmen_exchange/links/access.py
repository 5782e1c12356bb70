"""With what a rank goes to servers of shards. No torch is needed to read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fulmen.tls import TlsFiles

TOKEN_TTL_S = 30 * 86_400.0
"""How long the token of a group of ranks is good: a rank cannot have another one, as it never sees the signing key.

A group that lives longer is refused then, which ends it with a clear error; the run goes on from its newest checkpoint with
another group, which has a token of its own.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkAccess:
    """What the service gives its ranks for their link.

    Attributes:
        training_run: `trainingRuns/{id}`, by which the servers know the exchange.
        token: Of role `service`, bound to the run's project; empty where servers take calls without one.
        tls: With what a server is called, by its address; None for no TLS.
    """

    training_run: str
    token: str = field(default="", repr=False)
    tls: Mapping[str, TlsFiles | None] = field(default_factory=dict)
