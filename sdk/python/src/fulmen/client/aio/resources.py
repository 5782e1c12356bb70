"""Resources: versions with content; prompts and models among them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fulmen.algorithm.v1 import weight_service_pb2 as pb
from fulmen.client.aio.base import Part, listed
from fulmen.client.extras import imported
from fulmen.client.resources import Model, Prompt, Resource
from fulmen.client.view import Named, name_of
from fulmen.models.card import read_lineage, write_card
from fulmen.models.push import hub_repository, push_model
from fulmen.models.transfer import Progress, download_weights, upload_model
from fulmen.policy_versions import PolicyVersion
from fulmen.rpc.home import await_at_home
from fulmen.rpc.resource_contents import read_resources
from fulmen.store.v1 import resource_pb2, resource_service_pb2
from fulmen.training.publish import PROMPT_CONTENT_TYPE

__all__ = ["AsyncModels", "AsyncPrompts", "AsyncResources"]

POLICY_PREFIX = "policy."
PROMPT_PREFIX = "prompt."


class AsyncResources(Part):
    """Versioned resources of every kind."""

    async def publish(
        self,
        id: str,
        content: bytes | str | Mapping[str, Any] | list[Any],
        *,
        kind: str,
        content_type: str = "",
        parent: str | Named = "",
        metadata: Mapping[str, str] | None = None,
    ) -> Resource:
        """Publishes a new version.

        >>> published = await client.resources.publish("limits.demo", {"most": 3}, kind="limits")
        >>> published.version
        1

        Args:
            id: id of the resource, 1 to 128 characters of [a-z0-9._-].
            content: bytes, text, or values that are encoded as JSON; at most 16 MiB.
            kind: kind of the resource, the same for all its versions.
            content_type: media type; empty to derive it from the content's Python type.
            parent: the version that this one was made from.
            metadata: at most 32 entries of 1 KiB.

        Raises:
            ArgumentInvalid: if the content is not of its kind.
        """
        packed, media_type = _packed(content)
        version = resource_pb2.ResourceVersion(
            name=f"resources/{id}",
            project=self._session.project,
            kind=kind,
            content=packed,
            content_type=content_type or media_type,
            parent=name_of(parent),
            metadata=metadata or {},
        )
        request = resource_service_pb2.PublishResourcesRequest(resources=[version])
        return Resource((await self._services.resources.PublishResources(request)).resources[0])

    async def get(self, name: str | Named) -> Resource:
        """Returns a version with its content.

        >>> (await client.resources.get("limits.demo")).json
        {'most': 3}

        Args:
            name: an id, for its latest version; an id with `/versions/{n}` or `/aliases/{alias}`; or a record.

        Raises:
            ResourceNotFound: if there is none.
        """
        names = [_full(name_of(name))]
        (found,) = await read_resources(self._services.resources, names, project=self._session.project)
        return Resource(found)

    async def list(self, *, kind: str = "") -> AsyncIterator[Resource]:
        """Yields the latest version of every resource, without content; only of one kind if given.

        >>> [each.id async for each in client.resources.list(kind="limits")]
        ['limits.demo']
        """
        request = resource_service_pb2.ListResourceVersionsRequest(project=self._session.project, kind=kind)
        async for each in listed(self._services.resources.ListResourceVersions, request, "resources"):
            yield Resource(each)

    async def versions(self, id: str) -> AsyncIterator[Resource]:
        """Yields the versions of a resource, newest first, without content.

        >>> [each.version async for each in client.resources.versions("limits.demo")]
        [1]

        Raises:
            ResourceNotFound: if there is none.
        """
        request = resource_service_pb2.ListResourceVersionsRequest(
            parent=f"resources/{id}", project=self._session.project
        )
        async for each in listed(self._services.resources.ListResourceVersions, request, "resources"):
            yield Resource(each)

    async def set_alias(self, id: str, alias: str, version: int) -> None:
        """Points an alias to a version.

        >>> await client.resources.set_alias("limits.demo", "best", 1)
        >>> (await client.resources.get("limits.demo/aliases/best")).version
        1

        Raises:
            ResourceNotFound: if there is no such version.
            ArgumentInvalid: if the alias is `latest`, which moves automatically.
        """
        request = resource_service_pb2.SetAliasRequest(
            name=f"resources/{id}/aliases/{alias}", version=version, project=self._session.project
        )
        await self._services.resources.SetAlias(request)

    async def diff(self, base: str | Named, target: str | Named) -> str:
        """Returns what changed between two versions, as a unified diff; empty if they are equal or not text.

        Raises:
            ResourceNotFound: if one of them does not exist.
        """
        request = resource_service_pb2.DiffResourcesRequest(
            base=_full(name_of(base)), target=_full(name_of(target)), project=self._session.project
        )
        return str((await self._services.resources.DiffResources(request)).unified_diff)


class AsyncPrompts(Part):
    """Prompts: resources `prompt.{name}` of kind `prompt`, whose content is text."""

    async def publish(self, name: str, text: str) -> Prompt:
        """Publishes a text as the next version of a prompt.

        >>> await client.prompts.publish("polite", "Answer politely.")
        Prompt(name='resources/prompt.polite/versions/1')

        Args:
            name: name of the prompt, without the prefix `prompt.`.
            text: the prompt.
        """
        resources = AsyncResources(self._session)
        version = await resources.publish(
            f"{PROMPT_PREFIX}{name}", text, kind="prompt", content_type=PROMPT_CONTENT_TYPE
        )
        return Prompt(version.proto)

    async def get(self, name: str, *, version: int | str = "latest") -> Prompt:
        """Returns a version of a prompt.

        >>> (await client.prompts.get("polite")).text
        'Answer politely.'

        Args:
            name: name of the prompt.
            version: its number, or an alias such as `best`.

        Raises:
            ResourceNotFound: if there is none.
        """
        return Prompt(await _read_version(self, f"{PROMPT_PREFIX}{name}", version))

    async def list(self) -> AsyncIterator[Prompt]:
        """Yields the latest version of every prompt, without text.

        >>> [each.version async for each in client.prompts.list()]
        [1]
        """
        async for each in AsyncResources(self._session).list(kind="prompt"):
            yield Prompt(each.proto)

    async def versions(self, name: str) -> AsyncIterator[Prompt]:
        """Yields the versions of a prompt, newest first, without text.

        Raises:
            ResourceNotFound: if there is none.
        """
        async for each in AsyncResources(self._session).versions(f"{PROMPT_PREFIX}{name}"):
            yield Prompt(each.proto)


class AsyncModels(Part):
    """Models: versions of trained policies, and uploaded models to start a training from."""

    async def get(self, policy: str, *, version: int | str = "latest") -> Model:
        """Returns a version of a policy.

        Args:
            policy: name of the policy.
            version: its number, or an alias.

        Raises:
            ResourceNotFound: if there is none.
        """
        return Model(await _read_version(self, f"{POLICY_PREFIX}{policy}", version))

    async def list(self) -> AsyncIterator[Model]:
        """Yields the latest version of every policy, without its description.

        >>> [model.policy async for model in client.models.list()]
        []
        """
        async for each in AsyncResources(self._session).list(kind="policy"):
            yield Model(each.proto)

    async def versions(self, policy: str) -> AsyncIterator[Model]:
        """Yields the versions of a policy, newest first, without their descriptions.

        Raises:
            ResourceNotFound: if there is none.
        """
        async for each in AsyncResources(self._session).versions(f"{POLICY_PREFIX}{policy}"):
            yield Model(each.proto)

    async def upload(
        self, folder: str | PathLike[str], *, name: str = "", on_progress: Progress = lambda done, total: None
    ) -> str:
        """Uploads the files of a folder in the format of `transformers` that the deployment does not have; returns the
        value for `base`.

        Call it again to resume an interrupted upload.

        Args:
            folder: the folder; files that are not model data, such as pickles, are left out.
            name: name of the model, 1 to 63 of [a-z0-9._-]; without one it is found by its digest.
            on_progress: called with the bytes that have arrived and their total, in a thread of the client.

        Returns:
            `model:{name}`, or `model:{digest}`.

        Raises:
            ArgumentInvalid: if it cannot be a model; lists all problems.
            ModelExists: if the name belongs to another model.
            QuotaExceeded: if the project's quota is used up.
            TransferFailed: if a file changes while it is read.
        """
        # At home, where the stream is sent.
        done = await await_at_home(
            lambda: upload_model(
                self._services.weights,
                Path(folder),
                project=self._session.project,
                alias=name,
                on_progress=on_progress,
            )
        )
        return f"model:{name or done.model.name.rpartition('/')[2]}"

    async def download(
        self,
        model: str | Named,
        folder: str | PathLike[str],
        *,
        full: bool = False,
        on_progress: Progress = lambda done, total: None,
    ) -> Path:
        """Downloads weights; the folder appears once all files have arrived and were verified.

        Args:
            model: a version of a policy, its name or its record, or `model:{name}` for one that was uploaded.
            folder: the new folder, which must not exist or be empty.
            full: for a policy that was trained as adapters, whether to download merged weights instead.
            on_progress: called with the bytes that have arrived and their total.

        Returns:
            The folder.

        Raises:
            ModelNotFound: if the model does not exist, or its weights were deleted.
            WeightsUnavailable: if there are no merged weights of the adapters.
            TransferFailed: if the folder exists and is not empty.
        """
        named, project = name_of(model), self._session.project
        if named.startswith("model:"):
            source = pb.WeightSource(model=f"{project}/models/{named.removeprefix('model:')}")
        else:
            form = pb.WEIGHT_FORM_FULL if full else pb.WEIGHT_FORM_UNSPECIFIED
            source = pb.WeightSource(policy_version=_full(named), project=project, form=form)
        await download_weights(self._services.weights, source, Path(folder), on_progress=on_progress)
        return Path(folder)

    async def export(
        self,
        model: str | Named,
        folder: str | PathLike[str],
        *,
        on_progress: Progress = lambda done, total: None,
    ) -> Path:
        """Downloads the full weights of a trained model, and writes a model card (README.md) from the report of its run.

        Args:
            model: a version of a policy: its name or its record, such as `run.model()`.
            folder: the new folder, which must not exist or be empty.
            on_progress: called with the bytes that have arrived and their total.

        Returns:
            The folder, which other programs can load and `push` uploads.

        Raises:
            ResourceNotFound: if there is no such version.
            ValueError: if it does not describe weights.
            ModelNotFound: if its weights were deleted.
            WeightsUnavailable: if it consists of adapters without merged weights.
            TransferFailed: if the folder exists and is not empty.
        """
        resource = await AsyncResources(self._session).get(model)
        lineage = await read_lineage(self._services, PolicyVersion.read(resource.proto))
        written = await self.download(resource, folder, full=True, on_progress=on_progress)
        write_card(written, lineage)
        return written

    async def push(self, folder: str | PathLike[str], repository: str, *, public: bool = False) -> str:
        """Uploads an exported model to a repository of a hub, which is created if it does not exist.

        The server and the token are configured as for huggingface_hub: HF_ENDPOINT, HF_TOKEN, `hf auth login`.

        Args:
            folder: a folder that `export` has written.
            repository: `organisation/name`, also with `@branch`.
            public: whether a new repository is public.

        Returns:
            The URL of the commit.

        Raises:
            ExtraMissing: if huggingface_hub is not installed.
            ValueError: if `repository` is not the name of a repository.
            FileNotFoundError: if the folder contains no model.
            PushFailed: if the hub refuses, or cannot be reached.
        """
        hub = imported("huggingface_hub", extra="hub", purpose="push()")
        imported("huggingface_hub.errors", extra="hub", purpose="push()")
        return await asyncio.to_thread(push_model, hub, Path(folder), hub_repository(repository), public=public)


async def _read_version(part: Part, id_of_resource: str, version: int | str) -> resource_pb2.ResourceVersion:
    word = "versions" if isinstance(version, int) else "aliases"
    found = await AsyncResources(part._session).get(f"{id_of_resource}/{word}/{version}")
    return found.proto


def _full(name: str) -> str:
    return name if name.startswith("resources/") else f"resources/{name}"


def _packed(content: Any) -> tuple[bytes, str]:
    """Returns the bytes and the media type of a content."""
    match content:
        case bytes():
            return content, "application/octet-stream"
        case str():
            return content.encode(), "text/plain; charset=utf-8"
        case _:
            return json.dumps(content, ensure_ascii=False).encode(), "application/json"
