"""Versions of a policy as a run publishes them, with weights that are small and differ in one word."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen_algorithm.weights.tensor_files import RawTensor, Weights
from fulmen_service_kit.security.tokens import Role
from tests.support.store.running import StoreHandle

__all__ = ["Policies", "tensors"]


class Policies:
    """The versions of a policy, as a run publishes them, and a client that downloads them."""

    def __init__(self, runs: Path, client: WeightServiceStub, store: StoreHandle) -> None:
        self._folder = runs / "default/run/models"
        self.client = client
        self._store = store

    async def publish(self, name: str, description: Mapping[str, object]) -> Path:
        """Publishes the next version, whose weights are in a folder of a name."""
        path = self._folder / name
        path.mkdir(parents=True)
        content = json.dumps({"path": str(path), "dtype": "float32", "size_bytes": 1, "step": 1, **description})
        version = resource_pb2.ResourceVersion(
            name="resources/policy.solver", kind="policy", content=content.encode(), project="projects/default"
        )
        stubs = await self._store.stubs(role=Role.SERVICE)
        await stubs.resources.PublishResources(resource_service_pb2.PublishResourcesRequest(resources=[version]))
        return path

    def source(self, version: str, form: pb.WeightForm = pb.WEIGHT_FORM_UNSPECIFIED) -> pb.WeightSource:
        return pb.WeightSource(policy_version=f"resources/policy.solver{version}", form=form)


def tensors(last: int) -> Weights:
    """Returns weights of which one word differs."""
    words = np.arange(101, dtype=np.uint32)
    words[-1] += last
    return Weights(tensors={"w": RawTensor(dtype="F32", shape=(101,), words=words)})
