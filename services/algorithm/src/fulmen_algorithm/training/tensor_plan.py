"""Which models tensor parallelism splits over how many ranks. Importable without torch, until it is asked."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLUMNS, ROWS, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Styles of the library's plans: by outputs, by inputs, and on every rank with gradients of its own heads alone."""
_KNOWN = {COLUMNS, ROWS, PARTIAL}


def split_problems(config: Mapping[str, Any], tensor: int) -> list[str]:
    """Returns why the matrices of a model cannot be split over so many ranks; imports transformers.

    Args:
        config: The model's configuration, as in `config.json`.
        tensor: Ranks.
    """
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    kind = str(text.get("model_type") or config.get("model_type") or "")
    found = _plan_problems(kind)
    heads = text.get("num_attention_heads")
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": text.get("num_key_value_heads") or heads,
        "intermediate_size": text.get("intermediate_size"),
    }
    found += [
        f"{name}, {size} in the model's configuration, is not a multiple of {tensor}"
        for name, size in sizes.items()
        if isinstance(size, int) and size % tensor
    ]
    return [f"tensor: {problem}" for problem in found]


def folder_problems(model_dir: Path, tensor: int) -> list[str]:
    """Returns the same of the model in a folder; blocks. A model that cannot be read has no problems here: its trainer
    reports the reason."""
    try:
        config = json.loads((model_dir / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    return split_problems(config, tensor) if isinstance(config, Mapping) else []


def _plan_problems(kind: str) -> list[str]:
    # Imported late: it takes a second, and most runs split nothing.
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    plan = getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None) if kind in CONFIG_MAPPING else None
    if not plan:
        return [f"transformers has no plan for models of type {kind or 'unknown'}"]
    if others := sorted({*plan.values()} - _KNOWN):
        return [
            f"the plan of models of type {kind} has {', '.join(others)}: experts and joined matrices are not split here"
        ]
    return []
