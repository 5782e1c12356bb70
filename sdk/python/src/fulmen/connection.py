"""The services to call and the token for them: named services, or a local stack.

The local stack is a separate distribution, registered under the entry point group `fulmen.local_stack`.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from fulmen.ids import ALL_PROJECTS, DEFAULT_PROJECT
from fulmen.rpc.services import Targets
from fulmen.rpc.tls import TlsFiles

__all__ = [
    "DEFAULT_STATE_DIR",
    "Deployment",
    "LocalStack",
    "LocalStackMissing",
    "TokenUnreadable",
    "claims_of",
    "find_local_stack",
    "start_local_stack",
]

_LOCAL_STACKS: Final = "fulmen.local_stack"
_FINDS: Final = "stack"
_STARTS: Final = "start"
_NOT_INSTALLED: Final = 'the local stack is not installed: pip install "fulmen[local]"'
DEFAULT_STATE_DIR: Final = Path(".fulmen")
USUAL_TARGETS: Final = Targets(store="127.0.0.1:7101", algorithm="127.0.0.1:7301", llm_proxy="127.0.0.1:7201")
STATE_DIR_VARIABLE: Final = "FULMEN_STATE_DIR"
TOKEN_VARIABLE: Final = "FULMEN_TOKEN"  # noqa: S105  # The variable's name.
TARGET_VARIABLES: Final = {
    "store": "FULMEN_STORE_TARGET",
    "algorithm": "FULMEN_ALGORITHM_TARGET",
    "llm_proxy": "FULMEN_LLM_PROXY_TARGET",
}


class LocalStackMissing(Exception):
    """Raised when no local stack is installed or running."""


class TokenUnreadable(Exception):
    """Raised when the token of a running stack cannot be read, because the stack belongs to another user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStack:
    """A running local stack.

    Attributes:
        targets: Addresses of its services.
        token_file: File with a token of role client, which is renewed regularly.
    """

    targets: Targets
    token_file: Path

    def token(self) -> str:
        """Returns the current token.

        Raises:
            TokenUnreadable: if it cannot be read.
        """
        try:
            return self.token_file.read_text(encoding="utf-8").strip()
        except OSError:
            raise TokenUnreadable(
                f"Cannot read the stack's token file {self.token_file}: give a token with {TOKEN_VARIABLE}."
            ) from None


def find_local_stack(state_dir: Path = DEFAULT_STATE_DIR) -> LocalStack:
    """Returns the local stack running on a state directory.

    Raises:
        LocalStackMissing: if none is installed or running there.
    """
    find: Callable[[Path], LocalStack | None] = _provided(_FINDS)
    stack = find(state_dir)
    if stack is None:
        raise LocalStackMissing(f"no stack is running on {state_dir}: start one with `fulmen up`")
    return stack


def start_local_stack(
    state_dir: Path, *, runners: int, slots: int | None, environment: Mapping[str, str]
) -> AbstractContextManager[LocalStack]:
    """Starts a stack for the duration of a block; it ends with this process at the latest.

    Raises:
        LocalStackMissing: if none is installed.
        Exception: if it does not start; the message has the reason.
    """
    start: Callable[..., AbstractContextManager[LocalStack]] = _provided(_STARTS)
    return start(state_dir, runners=runners, slots=slots, environment=environment)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """The services to call; missing values are taken from the stack that runs on the state directory.

    Attributes:
        store: Address of the store, `host:port`; empty for the local stack's.
        algorithm: Address of the algorithm service, likewise.
        llm_proxy: Address of the LLM proxy's gRPC port, likewise; of several, separated by commas, the first.
        token: API token; empty for the local stack's.
        state_dir: State directory of the local stack.
    """

    store: str = ""
    algorithm: str = ""
    llm_proxy: str = ""
    token: str = field(default="", repr=False)
    state_dir: Path = DEFAULT_STATE_DIR

    @classmethod
    def found(
        cls, given: Mapping[str, str], state_dir: Path | None, environment: Mapping[str, str] = os.environ
    ) -> Deployment:
        """Returns the given deployment, otherwise the environment's, otherwise the stack of this folder.

        Args:
            given: addresses and token by name, empty if they are not given.
            state_dir: state directory; if it is given and no service is, only its stack is used.
            environment: variables such as FULMEN_STORE_TARGET, FULMEN_TOKEN and FULMEN_STATE_DIR.
        """
        named = {name: value for name, value in given.items() if value}
        if state_dir is not None:
            return cls(**named, state_dir=state_dir)
        variables = {**TARGET_VARIABLES, "token": TOKEN_VARIABLE}
        known = {name: environment[variable] for name, variable in variables.items() if environment.get(variable)}
        folder = environment.get(STATE_DIR_VARIABLE)
        return cls(**{**known, **named}, state_dir=Path(folder) if folder else DEFAULT_STATE_DIR)

    @property
    def names_services(self) -> bool:
        """Whether a service is named, so that the local stack's token is not used."""
        return any((self.store, self.algorithm, self.llm_proxy))

    def targets(self) -> Targets:
        """Returns the address of each service: the given one, the running stack's, or the usual port.

        Raises:
            LocalStackMissing: if no service is named and no stack is running.
        """
        try:
            known = find_local_stack(self.state_dir).targets
        except LocalStackMissing:
            if not self.names_services:
                raise
            known = USUAL_TARGETS
        proxies = [each.strip() for each in self.llm_proxy.split(",") if each.strip()]
        return Targets(
            store=self.store or known.store,
            algorithm=self.algorithm or known.algorithm,
            llm_proxy=proxies[0] if proxies else known.llm_proxy,
        )

    def bearer(self) -> str | None:
        """Returns the token to send; None for services that are named without one.

        Raises:
            LocalStackMissing: if it is the token of a stack that is not running.
            TokenUnreadable: if the stack belongs to another user.
        """
        if self.token:
            return self.token
        return None if self.names_services else find_local_stack(self.state_dir).token()

    def tls(self) -> TlsFiles | None:
        """Returns the files for TLS, from FULMEN_TLS_CA_FILE and related variables; a local stack has no TLS."""
        return TlsFiles.from_environment() if self.names_services else None

    @property
    def project(self) -> str:
        """The project in which short names are looked up: the token's, or the default one."""
        try:
            claims = claims_of(self.bearer() or "") or {}
        except (LocalStackMissing, TokenUnreadable):
            claims = {}
        bound = str(claims.get("prj", ALL_PROJECTS))
        return DEFAULT_PROJECT if bound == ALL_PROJECTS else bound


def claims_of(bearer: str) -> dict[str, Any] | None:
    """Returns the claims of a token, unverified; None if it is not one of Fulmen."""
    parts = bearer.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, UnicodeDecodeError, json.JSONDecodeError):
        return None
    return claims if isinstance(claims, dict) and isinstance(claims.get("exp"), int) else None


def _provided(name: str) -> Any:
    """Loads an entry point of the local stack's distribution."""
    for entry_point in entry_points(group=_LOCAL_STACKS):
        if entry_point.name == name:
            return entry_point.load()
    raise LocalStackMissing(_NOT_INSTALLED)
