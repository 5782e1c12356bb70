"""A policy of which versions are published at a real algorithm service, and those who fetch them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fulmen.algorithm.v1 import engine_service_pb2 as pb
from fulmen.algorithm.v1.weight_service_pb2_grpc import WeightServiceStub
from fulmen.rpc.channel import open_channel
from fulmen_algorithm.runs.ports import PublishedPolicy
from fulmen_algorithm.weight_agent.fetching import Counted, VersionFetcher
from fulmen_algorithm.weight_agent.held import HeldVersions
from fulmen_algorithm.weights.delta import DELTA_FILE, encode
from fulmen_algorithm.weights.tensor_files import read_folder, write_tensors
from fulmen_service_kit.security.tokens import Role
from tests.support.algorithm.model_folders import model_folder
from tests.support.algorithm.policy_versions import Policies, tensors
from tests.support.services import serving, target_of
from tests.support.store.running import StoreHandle

__all__ = ["PROJECT", "World", "weights_of", "world"]

PROJECT = "projects/default"


class World:
    """A policy that is published, and the fetcher of an engine that serves it."""

    def __init__(self, policies: Policies, folder: Path) -> None:
        self.policies = policies
        self._folder = folder
        self.fetched = Counted()
        self.restart()

    def restart(self) -> World:
        """Begins another life of the agent, in the same folder."""
        self.held = HeldVersions()
        self.fetcher = VersionFetcher(self.policies.client, self._folder, project=PROJECT, held=self.held)
        return self

    async def full(self, number: int) -> Path:
        """Publishes complete weights as the next version, of this number."""
        sha256 = tensors(number).sha256()
        folder = model_folder(await self.policies.publish(f"{number:06d}-full", {"kind": "full", "sha256": sha256}))
        write_tensors(folder / "model.safetensors", tensors(number).tensors, {})
        return folder

    async def delta(self, number: int) -> Path:
        """Publishes the difference from the version before."""
        base = {
            "base": f"resources/policy.solver/versions/{number - 1}",
            "base_sha256": tensors(number - 1).sha256(),
        }
        description = {"kind": "delta", "sha256": tensors(number).sha256(), "step": number, **base}
        folder = await self.policies.publish(f"{number:06d}-delta", description)
        encode(tensors(number - 1), tensors(number), folder / DELTA_FILE)
        return folder

    async def lora(self, number: int, base: Path) -> Path:
        """Publishes an adapter."""
        description = {"kind": "lora", "sha256": "", "adapters": ["default"], "base_model": str(base)}
        folder = await self.policies.publish(f"{number:06d}-lora", description)
        return model_folder(folder, more={"default/adapter_config.json": b"{}"}, seed=number)

    async def fetch(
        self, kind: pb.WeightsKind, number: int, *, loaded: int = 0, peer: pb.Peer | None = None
    ) -> PublishedPolicy:
        """Fetches a version for an engine that has loaded another one, or none, from a peer if possible."""
        name = f"resources/policy.solver/versions/{number}"
        order = pb.LoadWeights(order=number, policy_version=name, kind=kind, peer=peer)
        if kind == pb.WEIGHTS_KIND_LORA:
            order.adapters.append("default")
        else:
            order.sha256 = tensors(number).sha256()
        if kind == pb.WEIGHTS_KIND_DELTA:
            order.base_version, order.base_sha256 = number - 1, tensors(number - 1).sha256()
        self.fetched = Counted()
        loaded_sha256 = tensors(loaded).sha256() if loaded else ""
        return await self.fetcher.fetch(order, loaded_sha256=loaded_sha256, fetched=self.fetched)

    def kept(self) -> set[str]:
        """Returns the folders that there are."""
        return {path.name for path in [*self._folder.iterdir(), *(self._folder / "whole").glob("*")]} - {"whole"}


@pytest.fixture
async def world(store: StoreHandle, tmp_path: Path) -> AsyncIterator[World]:
    async with (
        serving("algorithm", store, tmp_path) as parts,
        open_channel(target_of(parts), token=store.token(Role.CLIENT, project=PROJECT)) as channel,
    ):
        policies = Policies(tmp_path / "state/runs", WeightServiceStub(channel), store)
        yield World(policies, tmp_path / "agent")


async def weights_of(policy: PublishedPolicy) -> str:
    """Returns the checksum of a version's complete weights."""
    return read_folder(await policy.model_folder()).sha256()
