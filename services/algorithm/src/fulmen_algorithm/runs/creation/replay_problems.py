"""Why a run cannot replay the experts that its engine chose (`engine.router_replay`). Importable without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fulmen.errors import Violation
from fulmen_algorithm.policy.engine_settings import StartedEngine
from fulmen_algorithm.runs.algorithm import AlgorithmSettings, RunSettings
from fulmen_algorithm.runs.run import PolicyOrigin, PolicySpec

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in a model's configuration."""
FIELD = "settings.engine.router_replay"


def replay_problems(settings: RunSettings, policy: PolicySpec) -> list[Violation]:
    """Returns the problems that can be found before a run is created; blocks. The folder of `policy.path` is known to
    be allowed."""
    if not replays(settings):
        return []
    problems = []
    if isinstance(settings, AlgorithmSettings) and settings.passes.compile:
        problems.append("needs passes.compile to be false: compiled layers choose their experts themselves")
    if isinstance(settings, AlgorithmSettings) and settings.parallel.context > 1:
        problems.append("needs parallel.context 1: experts are replayed for whole rows")
    if policy.origin is PolicyOrigin.PATH and (problem := model_problem(Path(policy.source))):
        problems.append(problem)
    return [Violation(field=FIELD, description=problem) for problem in problems]


def replays(settings: RunSettings) -> bool:
    """Returns whether a run is to replay experts."""
    return isinstance(settings.engine, StartedEngine) and settings.engine.router_replay


def model_problem(model_dir: Path) -> str:
    """Returns why the experts of a model cannot be replayed; empty if they can, or its configuration is not readable."""
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        # Loading the model reports the reason.
        return ""
    if not isinstance(config, Mapping) or any(_has_experts(part) for part in (config, config.get("text_config"))):
        return ""
    return (
        f"the model ({config.get('model_type', 'of unknown type')}) is not a mixture of experts: remove router_replay"
    )


def _has_experts(config: Any) -> bool:
    return isinstance(config, Mapping) and any(isinstance(n := config.get(name), int) and n > 1 for name in EXPERTS)
