"""Names on Tinker's wire and what they are here: base models, checkpoints and their paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from fulmen.algorithm.v1.training_run_pb2 import PolicySpec
from fulmen.errors import ArgumentInvalid, Violation

__all__ = ["SAMPLER", "SAMPLER_POLICY", "WEIGHTS", "BaseNames", "checkpoint_id", "path_of", "read_path"]

WEIGHTS: Final = "weights"
SAMPLER: Final = "sampler_weights"
SAMPLER_POLICY: Final = "tinker-sampler"
"""Policy of trainers that only sample, by which they are recognized."""
_PREFIXES: Final = {WEIGHTS: "weights.", SAMPLER: "sampler."}
_PATH: Final = re.compile(rf"tinker://([a-z0-9-]{{1,63}})/({WEIGHTS}|{SAMPLER})/([a-z0-9._-]{{1,55}})")
_NAME: Final = re.compile(r"[a-z0-9._-]{1,55}")


class BaseNames:
    """Base models by the names that programs know."""

    def __init__(self, given: Mapping[str, str]) -> None:
        """`given` maps names to models; any other `org/name` is a model of the hub."""
        self.given = dict(given)

    def policy(self, name: str) -> PolicySpec:
        """Returns the weights that a name stands for. Raises ArgumentInvalid if it stands for none."""
        place = self.given.get(name) or (f"hf:{name}" if re.fullmatch(r"[\w.-]+/[\w.-]+", name) else "")
        if not place:
            known = f" Known are: {', '.join(sorted(self.given))}." if self.given else ""
            text = f"{name[:100]!r} is neither a model of this service nor an organization/name of the hub.{known}"
            raise ArgumentInvalid("The model is unknown.", violations=[Violation(field="base_model", description=text)])
        policy = PolicySpec(name=re.sub(r"[^a-z0-9._-]+", "-", f"tinker-{name.rpartition('/')[2]}".lower())[:63])
        if place.startswith(("hf:", "model:")):
            policy.base = place
        elif place.startswith("resources/"):
            policy.version = place
        else:
            policy.path = place
        return policy

    def name_of(self, policy: PolicySpec) -> str:
        """Returns the name of a trainer's first weights."""
        place = str(getattr(policy, policy.WhichOneof("initial") or "name"))
        names = [name for name, given in self.given.items() if given == place]
        return names[0] if names else place.removeprefix("hf:").partition("@")[0]


def checkpoint_id(kind: str, name: str) -> str:
    """Returns the id of a checkpoint of a trainer. Raises ArgumentInvalid if the name cannot be one."""
    if not _NAME.fullmatch(name):
        text = "must be 1 to 55 of [a-z0-9._-]"
        raise ArgumentInvalid(
            "The request is malformed.", violations=[Violation(field="path", description=f"{name[:100]!r} {text}")]
        )
    return f"{_PREFIXES[kind]}{name}"


def path_of(trainer: str, kind: str, name: str) -> str:
    """Returns the path of a checkpoint, `tinker://{trainer}/{kind}/{name}`."""
    return f"tinker://{trainer.rpartition('/')[2]}/{kind}/{name}"


def read_path(path: str, project: str) -> tuple[str, str, str]:
    """Reads a path.

    Args:
        path: `tinker://{trainer}/weights/{name}` or `tinker://{trainer}/sampler_weights/{name}`.
        project: Project of the caller.

    Returns:
        The trainer's name, the kind of the checkpoint, and its name in `TrainerService`.

    Raises:
        ArgumentInvalid: if it is none.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        text = f"{path[:200]!r} is not tinker://<run>/weights/<name> or tinker://<run>/sampler_weights/<name>"
        raise ArgumentInvalid("The request is malformed.", violations=[Violation(field="path", description=text)])
    trainer = f"{project}/trainers/{match[1]}"
    return trainer, match[2], f"{trainer}/checkpoints/{checkpoint_id(match[2], match[3])}"
