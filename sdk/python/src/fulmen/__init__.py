"""Fulmen's SDK: the API for agents. Everything is imported at first use, so `import fulmen` is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulmen.agent import Context, NotInAttempt, current, prompt
    from fulmen.emit import (
        CURRENT_SPAN,
        RewardInvalid,
        emit_annotation,
        emit_exception,
        emit_message,
        emit_object,
        emit_reward,
    )
    from fulmen.operations import operation
    from fulmen.spans.tracing import flush

__all__ = [
    "CURRENT_SPAN",
    "Context",
    "NotInAttempt",
    "RewardInvalid",
    "current",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "flush",
    "operation",
    "prompt",
]

_MODULES = {
    "fulmen.agent": ("Context", "NotInAttempt", "current", "prompt"),
    "fulmen.emit": (
        "CURRENT_SPAN", "RewardInvalid", "emit_annotation", "emit_exception", "emit_message", "emit_object",
        "emit_reward",
    ),
    "fulmen.operations": ("operation",),
    "fulmen.spans.tracing": ("flush",),
}  # fmt: skip
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fulmen' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
