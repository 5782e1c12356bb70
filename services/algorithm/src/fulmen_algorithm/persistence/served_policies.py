"""`served.json` in the state folder: the served versions, restored when the service restarts."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from fulmen_algorithm.persistence.files import replace_file
from fulmen_algorithm.policy.served import ServedPolicy
from fulmen_algorithm.training.settings import WeightsKind

_SERVED = TypeAdapter(list[ServedPolicy])


class ServedPolicies:
    """See `policy.served.ServedFile`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, served: Sequence[ServedPolicy]) -> None:
        """Replaces the file."""
        # The rebuild function is valid only in the process that published the version.
        plain = [replace(each, policy=replace(each.policy, rebuild=None)) for each in served]
        replace_file(self._path, json.dumps(_SERVED.dump_python(plain, mode="json"), indent=1).encode())

    def load(self) -> list[ServedPolicy]:
        """Reads the file; versions that are not complete, or whose folder is missing, are left out."""
        if not self._path.exists():
            return []
        return [each for each in _SERVED.validate_json(self._path.read_bytes()) if _whole(each)]


def _whole(served: ServedPolicy) -> bool:
    policy = served.policy
    base = policy.base_model is None or policy.base_model.is_dir()
    return policy.kind is not WeightsKind.DELTA and policy.path.is_dir() and base
