"""Agent Lightning's environment variables, and how they are read.

They name a store that Fulmen does not have: its services are found as `fulmen.Client` finds them. `AGL_CURRENT_ROLE` still
decides what `Trainer.fit` does: in the role `runner` nothing, since the runners are services.
"""

from __future__ import annotations

import os
from enum import Enum

__all__ = ["LightningEnvVar", "resolve_bool_env_var", "resolve_int_env_var", "resolve_str_env_var"]


class LightningEnvVar(Enum):
    """Environment variables of Agent Lightning."""

    AGL_EMITTER_DEBUG = "AGL_EMITTER_DEBUG"
    AGL_MANAGED_STORE = "AGL_MANAGED_STORE"
    AGL_CURRENT_ROLE = "AGL_CURRENT_ROLE"
    AGL_SERVER_HOST = "AGL_SERVER_HOST"
    AGL_SERVER_PORT = "AGL_SERVER_PORT"


_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


def resolve_bool_env_var(
    env_var: LightningEnvVar, override: bool | None = None, fallback: bool | None = None
) -> bool | None:
    """Returns the override, the variable's value, or the fallback.

    Raises:
        ValueError: If the variable is set to no truth value.
    """
    if override is not None:
        return override
    text = os.environ.get(env_var.value)
    if text is None:
        return fallback
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError(f"{env_var.value} must be one of {', '.join(sorted(_TRUE | _FALSE))}, not {text!r}.")
    return word in _TRUE


def resolve_int_env_var(
    env_var: LightningEnvVar, override: int | None = None, fallback: int | None = None
) -> int | None:
    """Returns the override, the variable's value, or the fallback.

    Raises:
        ValueError: If the variable is set to no integer.
    """
    if override is not None:
        return override
    text = os.environ.get(env_var.value)
    if text is None:
        return fallback
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{env_var.value} must be an integer, not {text!r}.") from None


def resolve_str_env_var(
    env_var: LightningEnvVar, override: str | None = None, fallback: str | None = None
) -> str | None:
    """Returns the override, the variable's value, or the fallback."""
    return override if override is not None else os.environ.get(env_var.value, fallback)
