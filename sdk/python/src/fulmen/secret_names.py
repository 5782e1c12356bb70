"""Names and limits of secrets, as the store checks them and command lines explain them.

The name determines the kind of a secret: `WEATHER_KEY` is an environment variable of agents that request it, `openai` the
key of backends with this `key_name`. No name can be both, so that one kind is never returned to readers of the other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

__all__ = [
    "MAX_AGENT_SECRETS",
    "MAX_BACKEND_KEY_BYTES",
    "MAX_HOST",
    "MAX_HOSTS",
    "MAX_SECRETS",
    "MAX_VALUE_BYTES",
    "MIN_VALUE_BYTES",
    "VENDORS",
    "Vendor",
    "is_backend_key",
    "name_problem",
    "place",
    "secrets_problems",
]

MAX_SECRETS: Final = 100
"""Maximum number of secrets of a project."""

MIN_VALUE_BYTES: Final = 8
"""Minimum size of a value: shorter ones cannot be masked in output without masking other text."""

MAX_VALUE_BYTES: Final = 64 * 1024
MAX_BACKEND_KEY_BYTES: Final = 8 * 1024
MAX_HOSTS: Final = 16
MAX_HOST: Final = 253
MAX_AGENT_SECRETS: Final = 16
"""Maximum number of secrets that one agent names."""

_VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_BACKEND_KEY: Final = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
_MODEL_KEYS: Final = frozenset({"OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"})
_SET_BY_RUNNERS: Final = frozenset(
    {"HOME", "NODE_EXTRA_CA_CERTS", "PATH", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "TMPDIR", "TRACEPARENT"}
)
_PREFIXES_OF_RUNNERS: Final = ("FULMEN_", "OTEL_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Vendor:
    """A model provider: the usual variable of its key, and the host of its API."""

    variable: str
    host: str


VENDORS: Final[Mapping[str, Vendor]] = {
    name: Vendor(variable=f"{name.upper()}_API_KEY", host=host)
    for name, host in {
        "anthropic": "api.anthropic.com",
        "cohere": "api.cohere.com",
        "deepseek": "api.deepseek.com",
        "fireworks": "api.fireworks.ai",
        "gemini": "generativelanguage.googleapis.com",
        "groq": "api.groq.com",
        "mistral": "api.mistral.ai",
        "openai": "api.openai.com",
        "openrouter": "openrouter.ai",
        "together": "api.together.xyz",
        "xai": "api.x.ai",
    }.items()
}
"""Well-known vendors, by the name of their key."""


def is_backend_key(name: str) -> bool:
    """Returns True if a name belongs to a backend's key, not to an agent's variable."""
    return bool(_BACKEND_KEY.fullmatch(name))


def place(project: str, name: str, hosts: Iterable[str]) -> str:
    """Returns the description of a secret's place, to which its sealed value is bound."""
    return json.dumps([project, name, *hosts], ensure_ascii=False)


def name_problem(name: str) -> str:
    """Returns the problem with the name of a secret of agents, or of a backend's key; empty if it is valid."""
    if is_backend_key(name):
        return ""
    if not _VARIABLE.fullmatch(name):
        return (
            "is neither a variable of agents (A-Z, 0-9 and _, at most 64 characters) nor the name of a backend's key "
            "(a-z, 0-9, '.', '_' and '-', at most 63); both begin with a letter"
        )
    if name in _MODEL_KEYS:
        return (
            "is the address or key with which agents call models through the proxy. Give a vendor's key to the proxy, "
            "under a name such as openai, or use another name"
        )
    if name in _SET_BY_RUNNERS or name.startswith(_PREFIXES_OF_RUNNERS):
        return "is set by runners. Use another name"
    return ""


def secrets_problems(names: tuple[str, ...], environment: tuple[str, ...]) -> list[str]:
    """Returns the problems with the secrets that an agent names.

    Args:
        names: The names.
        environment: Names of the agent's other variables.
    """
    problems = [f"{name[:64]!r} {problem}" for name in names if (problem := name_problem(name))]
    problems += [f"{name!r} is a backend's key, which agents never get" for name in names if is_backend_key(name)]
    problems += [f"{name!r} is also in environment" for name in names if name in environment]
    if len(set(names)) < len(names):
        problems.append("names must be unique")
    if len(names) > MAX_AGENT_SECRETS:
        problems.append(f"at most {MAX_AGENT_SECRETS}")
    return problems
