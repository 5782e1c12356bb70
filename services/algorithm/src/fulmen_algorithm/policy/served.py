"""The served versions: `served.json` in the state folder, restored when the service restarts."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
from pydantic import TypeAdapter, ValidationError

from fulmen_algorithm.persistence.files import replace_file
from fulmen_algorithm.policy.engine_settings import EngineSettings
from fulmen_algorithm.runs.ports import PublishedPolicy
from fulmen_algorithm.training.settings import WeightsKind


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPolicy:
    """A policy version served under its policy's name.

    Attributes:
        project: Its project.
        policy: The version.
        overrides: Request fields as JSON, by rollout mode.
        engine: Engine that serves it.
        run: Run that published it; empty if unknown.
    """

    project: str
    policy: PublishedPolicy
    overrides: Mapping[str, str]
    engine: EngineSettings
    run: str = ""


_log = structlog.get_logger()
_SERVED = TypeAdapter(list[ServedPolicy])


class ServedPolicies:
    """Storage of the served versions."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, served: Sequence[ServedPolicy]) -> None:
        """Replaces the file."""
        # The rebuild function is valid only in the process that published the version.
        plain = [replace(each, policy=replace(each.policy, rebuild=None)) for each in served]
        replace_file(self._path, json.dumps(_SERVED.dump_python(plain, mode="json"), indent=1).encode())

    def load(self) -> list[ServedPolicy]:
        """Reads the file; versions that are not complete, or whose folder is missing, are left out.

        A file that cannot be read names none: the next runs serve their policies again.
        """
        if not self._path.exists():
            return []
        try:
            served = _SERVED.validate_json(self._path.read_bytes())
        except ValidationError as error:
            _log.error("served_versions_unreadable", path=str(self._path), problems=error.error_count())
            return []
        return [each for each in served if _whole(each)]


def _whole(served: ServedPolicy) -> bool:
    policy = served.policy
    base = policy.base_model is None or policy.base_model.is_dir()
    return policy.kind is not WeightsKind.DELTA and policy.path.is_dir() and base
