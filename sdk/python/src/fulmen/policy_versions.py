"""Versions of policies as their resources describe them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from fulmen.store.v1 import resource_pb2

__all__ = ["POLICY_PREFIX", "PolicyVersion"]

POLICY_PREFIX: Final = "resources/policy."


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """A version of a policy.

    Attributes:
        resource: The resource, with its content.
        kind: Format of the weights: `full`, `delta` or `lora`.
        path: Folder of the weights on the machine of the algorithm service.
        run: Training run that published it; empty if unknown.
        step: Step of the run after which it was written.
        size_bytes: Size of its files.
        sha256: Checksum of its weights.
        base: delta: version that it applies to.
        base_model: lora: folder of the model that its adapters belong to.
        adapters: lora: names of the adapters.
        merged: lora: folder of a complete model with the adapter merged; empty if there is none.
    """

    resource: resource_pb2.ResourceVersion
    kind: str
    path: str
    run: str = ""
    step: int = 0
    size_bytes: int = 0
    sha256: str = ""
    base: str = ""
    base_model: str = ""
    adapters: tuple[str, ...] = ()
    merged: str = ""

    @classmethod
    def read(cls, resource: resource_pb2.ResourceVersion) -> PolicyVersion:
        """Reads what a resource of kind `policy` describes.

        Raises:
            ValueError: if it does not describe weights.
        """
        try:
            described: dict[str, Any] = json.loads(resource.content)
            return cls(
                resource=resource,
                kind=str(described.get("kind", "full")),
                path=str(described["path"]),
                run=str(described.get("run", "")),
                step=int(described.get("step", 0)),
                size_bytes=int(described.get("size_bytes", 0)),
                sha256=str(described.get("sha256", "")),
                base=str(described.get("base", "")),
                base_model=str(described.get("base_model", "")),
                adapters=tuple(map(str, described.get("adapters", ()))),
                merged=str(described.get("merged", "")),
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{resource.name} does not describe weights.") from error

    @property
    def name(self) -> str:
        """`resources/policy.{policy}/versions/{n}`."""
        return self.resource.name

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self.name.removeprefix(POLICY_PREFIX).partition("/")[0]

    @property
    def short(self) -> str:
        """`POLICY@VERSION`, as accepted by commands."""
        return f"{self.policy}@{self.resource.version}"
