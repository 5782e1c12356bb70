"""Fulmen's SDK: the API for agents, and the client. Everything is imported at first use, so `import fulmen` is cheap."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fulmen.agent import Context, NotInAttempt, current, prompt
    from fulmen.client.aio.client import AsyncClient
    from fulmen.client.local import local
    from fulmen.client.runs import RunFailed
    from fulmen.client.sync.client import Client
    from fulmen.client.trainers import Lora, Row
    from fulmen.connection import LocalStackMissing
    from fulmen.effects import EffectFailed, EffectUnknown, effect
    from fulmen.emit import (
        CURRENT_SPAN,
        RewardInvalid,
        emit_annotation,
        emit_exception,
        emit_message,
        emit_object,
        emit_progress,
        emit_reward,
    )
    from fulmen.models.push import PushFailed
    from fulmen.models.transfer import TransferFailed
    from fulmen.operations import operation
    from fulmen.row_files import ExtraMissing
    from fulmen.spans.tracing import flush
    from fulmen.train_toml.agent import AgentConfig, JudgeConfig
    from fulmen.train_toml.reader import ConfigError
    from fulmen.training.algorithm import Algorithm
    from fulmen.training.algorithms import (
        APO,
        CISPO,
        DAPO,
        DPO,
        GEPA,
        GRPO,
        GSPO,
        KTO,
        PPO,
        RLOO,
        SFT,
        DrGRPO,
        Evaluate,
        ReinforcePP,
        Rejection,
        Replay,
        RewardModel,
        Serve,
    )

__all__ = [
    "APO",
    "CISPO",
    "DAPO",
    "DPO",
    "DrGRPO",
    "Evaluate",
    "GEPA",
    "GRPO",
    "GSPO",
    "KTO",
    "PPO",
    "ReinforcePP",
    "Rejection",
    "Replay",
    "RewardModel",
    "RLOO",
    "SFT",
    "Serve",
    "AgentConfig",
    "Algorithm",
    "AsyncClient",
    "Client",
    "ConfigError",
    "ExtraMissing",
    "JudgeConfig",
    "LocalStackMissing",
    "Lora",
    "PushFailed",
    "Row",
    "RunFailed",
    "TransferFailed",
    "local",
    "CURRENT_SPAN",
    "Context",
    "EffectFailed",
    "EffectUnknown",
    "NotInAttempt",
    "RewardInvalid",
    "current",
    "effect",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_progress",
    "emit_reward",
    "flush",
    "operation",
    "prompt",
]

_MODULES = {
    "fulmen.agent": ("Context", "NotInAttempt", "current", "prompt"),
    "fulmen.emit": (
        "CURRENT_SPAN", "RewardInvalid", "emit_annotation", "emit_exception", "emit_message", "emit_object", "emit_progress",
        "emit_reward",
    ),
    "fulmen.client.aio.client": ("AsyncClient",),
    "fulmen.client.local": ("local",),
    "fulmen.client.runs": ("RunFailed",),
    "fulmen.client.sync.client": ("Client",),
    "fulmen.client.trainers": ("Lora", "Row"),
    "fulmen.connection": ("LocalStackMissing",),
    "fulmen.models.push": ("PushFailed",),
    "fulmen.models.transfer": ("TransferFailed",),
    "fulmen.effects": ("EffectFailed", "EffectUnknown", "effect"),
    "fulmen.operations": ("operation",),
    "fulmen.row_files": ("ExtraMissing",),
    "fulmen.train_toml.agent": ("AgentConfig", "JudgeConfig"),
    "fulmen.train_toml.reader": ("ConfigError",),
    "fulmen.training.algorithm": ("Algorithm",),
    "fulmen.training.algorithms": (
        "APO", "CISPO", "DAPO", "DPO", "DrGRPO", "Evaluate", "GEPA", "GRPO", "GSPO", "KTO", "PPO", "ReinforcePP", "Rejection",
        "Replay", "RewardModel", "RLOO", "SFT", "Serve",
    ),
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
