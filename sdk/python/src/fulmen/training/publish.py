"""Publishes the inputs of a training: bundle, agent and datasets. Unchanged content keeps its version."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fulmen.errors import ResourceNotFound
from fulmen.rpc.services import Services
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen.train_toml.agent import AgentConfig, agent_spec
from fulmen.train_toml.train import ConfigError
from fulmen.training.bundle import Bundle
from fulmen.training.task_files import Dataset

__all__ = ["Published", "Publisher", "publish", "published_prompt"]

AGENT_CONTENT_TYPE = "application/x-protobuf; messageType=fulmen.runner.v1.AgentSpec"
BUNDLE_CONTENT_TYPE = "application/gzip"
PROMPT_CONTENT_TYPE = "text/plain; charset=utf-8"
MAX_PROMPT_BYTES = 100_000
DATASET_CONTENT_TYPE = "application/jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """The pinned versions by use, and the new ones among them."""

    inputs: dict[str, str]
    new: tuple[str, ...]


async def publish(
    client: Services,
    *,
    name: str,
    agent: AgentConfig | None,
    bundle: Bundle,
    datasets: dict[str, Dataset],
    show_first: Callable[[Bundle], None] = lambda bundle: None,
) -> Published:
    """Publishes all inputs, the bundle before the agent that names it.

    Args:
        client: the services.
        name: the configuration's name; the resources are `bundle.<name>`, `agent.<name>`, `dataset.<name>.<use>`.
        agent: how the agent is started; None if there is none.
        bundle: the agent's files; without an agent and without files it is not published.
        datasets: the data by use.
        show_first: called before a bundle of this name is published for the first time.

    Raises:
        FulmenError: if the store refuses or cannot be reached.
    """
    publisher = Publisher(client)
    inputs: dict[str, str] = {}
    if agent is not None or bundle.files:
        if not await publisher.has(f"bundle.{name}"):
            show_first(bundle)
        inputs["bundle"] = await publisher.put(f"bundle.{name}", "bundle", BUNDLE_CONTENT_TYPE, bundle.content)
    if agent is not None:
        spec = agent_spec(agent, inputs["bundle"]).SerializeToString(deterministic=True)
        inputs["agent"] = await publisher.put(f"agent.{name}", "agent", AGENT_CONTENT_TYPE, spec)
    for use, dataset in datasets.items():
        resource = f"dataset.{name}.{use}"
        inputs[use] = await publisher.put(resource, "dataset", DATASET_CONTENT_TYPE, dataset.content)
    return Published(inputs=inputs, new=tuple(publisher.new))


async def published_prompt(client: Services, name: str, path: Path) -> str:
    """Publishes a prompt as `prompt.<name>`, unless that is its latest version; returns the version.

    Raises:
        ConfigError: if it is not text, empty, or too long for the environment of an agent.
        FulmenError: if the store refuses or cannot be reached.
    """
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8.", ()) from None
    if not text.strip() or len(content) > MAX_PROMPT_BYTES:
        raise ConfigError(f"{path} must have 1 to {MAX_PROMPT_BYTES} bytes.", ())
    return await Publisher(client).put(f"prompt.{name}", "prompt", PROMPT_CONTENT_TYPE, content)


class Publisher:
    """Publishes contents unless they are the latest version; `new` lists the versions created."""

    def __init__(self, client: Services) -> None:
        self._client = client
        self.new: list[str] = []

    async def put(self, resource_id: str, kind: str, content_type: str, content: bytes) -> str:
        """Returns the version with this content, publishing it if it is not the latest."""
        latest = await self._latest(resource_id)
        if latest is not None and latest.sha256 == hashlib.sha256(content).digest() and latest.kind == kind:
            return str(latest.name)
        version = resource_pb2.ResourceVersion(
            name=f"resources/{resource_id}", kind=kind, content_type=content_type, content=content
        )
        answer = await self._client.resources.PublishResources(
            resource_service_pb2.PublishResourcesRequest(resources=[version])
        )
        self.new.append(answer.resources[0].name)
        return str(answer.resources[0].name)

    async def has(self, resource_id: str) -> bool:
        """Returns whether a resource has a version."""
        return await self._latest(resource_id) is not None

    async def _latest(self, resource_id: str) -> resource_pb2.ResourceVersion | None:
        try:
            answer = await self._client.resources.ListResourceVersions(
                resource_service_pb2.ListResourceVersionsRequest(parent=f"resources/{resource_id}", page_size=1)
            )
        except ResourceNotFound:
            return None
        return answer.resources[0] if answer.resources else None
