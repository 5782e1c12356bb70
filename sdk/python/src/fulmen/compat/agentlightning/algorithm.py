"""Agent Lightning's algorithms, mapped to Fulmen's with the equivalent settings.

Settings that Fulmen has no counterpart of, such as memory options of an engine, are listed by `left_out`; `Trainer.fit` logs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fulmen.training.algorithm import Algorithm

__all__ = ["APO", "VERL", "Baseline", "NotPorted", "Planned"]


class NotPorted(NotImplementedError):
    """The program uses a part of Agent Lightning that another part of Fulmen replaces; the message names it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A training on Fulmen.

    Attributes:
        algorithm: The algorithm with its settings.
        base: First weights, as `base` of `client.train`; empty for none.
        left_out: Their settings without a counterpart, with dotted names.
    """

    algorithm: Algorithm
    base: str = ""
    left_out: tuple[str, ...] = ()


class Baseline:
    """Runs the agent on all tasks without training; for `Trainer.dev`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes their settings, which concern polling and printing."""


class APO:
    """Prompt search: Fulmen's `apo` (docs/apo.md), which is the same paper's (arXiv:2305.03495).

    A model is called through a route of the proxy by its name, unless the client has a base URL of its own, which the operator must
    allow (`FULMEN_ALGORITHM_CHAT_ENDPOINTS`). The client's key is not used.
    """

    def __init__(
        self,
        async_openai_client: Any = None,
        *,
        gradient_model: str = "gpt-5-mini",
        apply_edit_model: str = "gpt-4.1-mini",
        diversity_temperature: float = 1.0,
        gradient_batch_size: int = 4,
        val_batch_size: int = 16,
        beam_width: int = 4,
        branch_factor: int = 4,
        beam_rounds: int = 3,
        rollout_batch_timeout: float = 3600.0,
        run_initial_validation: bool = True,
        **_: Any,
    ) -> None:
        """Keeps the settings."""
        url = str(getattr(async_openai_client, "base_url", "") or "").rstrip("/")
        place = {"base_url": url} if url and not url.startswith("https://api.openai.com") else {}
        self.settings: dict[str, Any] = {
            "critic": {"model": gradient_model, **place},
            "editor": {"model": apply_edit_model, **place},
            "beam_width": beam_width,
            "branch_factor": branch_factor,
            "steps": beam_rounds,
            "gradient_tasks": gradient_batch_size,
            "gradient_examples": gradient_batch_size,
            "selection": {"kind": "halving", "tasks": val_batch_size},
        }
        others = {
            "diversity_temperature": diversity_temperature != 1.0,
            "rollout_batch_timeout": rollout_batch_timeout != 3600.0,
            "run_initial_validation": not run_initial_validation,
        }
        self._left_out = tuple(name for name, differs in others.items() if differs)

    def __class_getitem__(cls, _: Any) -> type[APO]:
        """Returns the class: `APO[Task]` names the type of tasks."""
        return cls

    def planned(self, task_count: int) -> Planned:
        """Returns the search; `task_count` does not change it."""
        del task_count
        return Planned(algorithm=Algorithm("apo", **self.settings), left_out=self._left_out)


_ESTIMATORS: Mapping[str, str] = {
    "grpo": "grpo",
    "rloo": "rloo",
    "reinforce_plus_plus": "reinforce_pp",
    "gae": "ppo",
}

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_MODEL = "actor_rollout_ref.model"
_SAME: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "data.train_batch_size": ("prompts_per_step", int),
    "data.max_response_length": ("max_tokens", int),
    f"{_ROLLOUT}.n": ("group_size", int),
    f"{_ROLLOUT}.temperature": ("temperature", float),
    f"{_ACTOR}.optim.lr": ("learning_rate", float),
    f"{_ACTOR}.optim.lr_warmup_steps": ("warmup_steps", lambda value: max(0, int(value))),
    f"{_ACTOR}.optim.weight_decay": ("weight_decay", float),
    f"{_ACTOR}.grad_clip": ("max_grad_norm", float),
    f"{_ACTOR}.ppo_epochs": ("epochs", int),
    f"{_MODEL}.enable_gradient_checkpointing": ("gradient_checkpointing", bool),
    "trainer.seed": ("seed", int),
}
"""Settings with a counterpart of the same meaning, and how their value is read."""

_READ = frozenset(
    {
        *_SAME,
        "algorithm.adv_estimator",
        "algorithm.use_kl_in_reward",
        "algorithm.kl_ctrl.kl_coef",
        f"{_MODEL}.path",
        f"{_MODEL}.lora_rank",
        f"{_MODEL}.lora_alpha",
        f"{_ACTOR}.ppo_mini_batch_size",
        f"{_ACTOR}.clip_ratio",
        f"{_ACTOR}.clip_ratio_low",
        f"{_ACTOR}.clip_ratio_high",
        f"{_ACTOR}.use_kl_loss",
        f"{_ACTOR}.kl_loss_coef",
        "trainer.total_training_steps",
        "trainer.total_epochs",
        "trainer.test_freq",
        "trainer.save_freq",
    }
)


class VERL:
    """Reinforcement learning with verl's configuration: `grpo`, `rloo`, `reinforce_pp` or `ppo` by `adv_estimator`."""

    def __init__(self, config: Mapping[str, Any], *_: Any, **__: Any) -> None:
        """Keeps the configuration.

        Raises:
            ValueError: If `algorithm.adv_estimator` has no counterpart.
        """
        self.config = config
        self._held = dict(_leaves(config, ""))
        estimator = str(self._held.get("algorithm.adv_estimator", "gae"))
        if estimator not in _ESTIMATORS:
            known = ", ".join(sorted(_ESTIMATORS))
            raise ValueError(f"algorithm.adv_estimator {estimator!r} has no counterpart; known: {known}.")
        self._name = _ESTIMATORS[estimator]

    def planned(self, task_count: int) -> Planned:
        """Returns the training; of the number of tasks depends how many steps an epoch has.

        Args:
            task_count: Number of training tasks.
        """
        held = self._held
        settings = {ours: read(held[theirs]) for theirs, (ours, read) in _SAME.items() if _is_set(held.get(theirs))}
        batch = settings.get("prompts_per_step", 1024)
        steps, small = held.get("trainer.total_training_steps"), held.get(f"{_ACTOR}.ppo_mini_batch_size")
        if steps is not None and steps != -1:
            settings["steps"] = int(steps)
        elif "trainer.total_epochs" in held:
            settings["steps"] = max(1, int(held["trainer.total_epochs"]) * math.ceil(task_count / batch))
        if small is not None and small != -1:
            settings["minibatches"] = max(1, batch // int(small))
        for theirs, ours in (("test_freq", "validate_every"), ("save_freq", "checkpoint_every")):
            if int(held.get(f"trainer.{theirs}") or 0) > 0:
                settings[ours] = int(held[f"trainer.{theirs}"])
        settings |= dict(self._losses())
        return Planned(
            algorithm=Algorithm(self._name, **settings),
            base=_base(str(held.get(f"{_MODEL}.path") or "")),
            left_out=tuple(sorted(held.keys() - _READ)),
        )

    def _losses(self) -> Iterator[tuple[str, Any]]:
        held = self._held
        both = held.get(f"{_ACTOR}.clip_ratio")
        low, high = (held.get(f"{_ACTOR}.clip_ratio_{end}", both) for end in ("low", "high"))
        if low is not None and high is not None and self._name != "rloo":
            yield "loss", {"kind": "clip", "low": float(low), "high": float(high)}
        if held.get(f"{_ACTOR}.use_kl_loss"):
            yield "kl", {"kind": "loss", "coefficient": float(held.get(f"{_ACTOR}.kl_loss_coef", 0.001))}
        elif held.get("algorithm.use_kl_in_reward"):
            yield "kl", {"kind": "reward", "coefficient": float(held.get("algorithm.kl_ctrl.kl_coef", 0.001))}
        if int(held.get(f"{_MODEL}.lora_rank") or 0) > 0:
            alpha = float(held.get(f"{_MODEL}.lora_alpha", 16))
            yield "lora", {"rank": int(held[f"{_MODEL}.lora_rank"]), "alpha": alpha}


def _is_set(value: Any) -> bool:
    return value is not None and value != -1


def _leaves(config: Mapping[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        name = f"{place}.{key}" if place else str(key)
        if isinstance(value, Mapping):
            yield from _leaves(value, name)
        else:
            yield name, value


def _base(path: str) -> str:
    """Returns the base that a path of theirs names: a folder, or else a model of the hub."""
    from pathlib import Path

    from fulmen.models.base_names import HUB_PREFIX, MODEL_PREFIX
    from fulmen.train_toml.reader import is_target

    if not path or path.startswith((HUB_PREFIX, MODEL_PREFIX)) or is_target(path) or Path(path).is_dir():
        return path
    return f"{HUB_PREFIX}{path}"
