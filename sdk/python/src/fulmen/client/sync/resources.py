"""Resources: versions with content; prompts and models among them. Made by tools/sync_client.py of `fulmen.client.aio.resources`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from fulmen.client.aio.resources import AsyncModels, AsyncPrompts, AsyncResources
from fulmen.client.face import Face
from fulmen.client.resources import Model, Prompt, Resource
from fulmen.client.view import Named
from fulmen.models.transfer import Progress

__all__ = ["Resources", "Prompts", "Models"]


class Resources(Face):
    """Versioned resources of every kind."""

    _wraps = AsyncResources
    _aio: AsyncResources

    def publish(
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

        >>> published = client.resources.publish("limits.demo", {"most": 3}, kind="limits")
        >>> published.version
        1

        Args:
            id: id of the resource, 1 to 128 characters of [a-z0-9._-].
            content: bytes, text, or values that become JSON; at most 16 MiB.
            kind: kind of the resource, the same for all its versions.
            content_type: media type; empty for that of the content's Python type.
            parent: the version that this one was made from.
            metadata: at most 32 entries of 1 KiB.

        Raises:
            ArgumentInvalid: if the content is not of its kind.
        """
        return self._call(
            self._aio.publish(id, content, kind=kind, content_type=content_type, parent=parent, metadata=metadata)
        )

    def get(self, name: str | Named) -> Resource:
        """Returns a version with its content.

        >>> (client.resources.get("limits.demo")).json
        {'most': 3}

        Args:
            name: an id, of which the latest version is meant; an id with `/versions/{n}` or `/aliases/{alias}`; or a record.

        Raises:
            ResourceNotFound: if there is none.
        """
        return self._call(self._aio.get(name))

    def list(self, *, kind: str = "") -> Iterator[Resource]:
        """Yields the latest version of every resource, without content; only of one kind if given.

        >>> [each.id for each in client.resources.list(kind="limits")]
        ['limits.demo']
        """
        return self._iterate(self._aio.list(kind=kind))

    def versions(self, id: str) -> Iterator[Resource]:
        """Yields the versions of a resource, newest first, without content.

        >>> [each.version for each in client.resources.versions("limits.demo")]
        [1]

        Raises:
            ResourceNotFound: if there is none.
        """
        return self._iterate(self._aio.versions(id))

    def set_alias(self, id: str, alias: str, version: int) -> None:
        """Points an alias to a version.

        >>> client.resources.set_alias("limits.demo", "best", 1)
        >>> (client.resources.get("limits.demo/aliases/best")).version
        1

        Raises:
            ResourceNotFound: if there is no such version.
            ArgumentInvalid: if the alias is `latest`, which moves by itself.
        """
        self._call(self._aio.set_alias(id, alias, version))

    def diff(self, base: str | Named, target: str | Named) -> str:
        """Returns what changed between two versions, as a unified diff; empty if they are equal or not text.

        Raises:
            ResourceNotFound: if one of them does not exist.
        """
        return self._call(self._aio.diff(base, target))

    @property
    def aio(self) -> AsyncResources:
        """The same, asynchronous, over the same connection."""
        return self._aio


class Prompts(Face):
    """Prompts: resources `prompt.{name}` of kind `prompt`, whose content is text."""

    _wraps = AsyncPrompts
    _aio: AsyncPrompts

    def publish(self, name: str, text: str) -> Prompt:
        """Publishes a text as the next version of a prompt.

        >>> client.prompts.publish("polite", "Answer politely.")
        Prompt(name='resources/prompt.polite/versions/1')

        Args:
            name: name of the prompt, without the prefix `prompt.`.
            text: the prompt.
        """
        return self._call(self._aio.publish(name, text))

    def get(self, name: str, *, version: int | str = "latest") -> Prompt:
        """Returns a version of a prompt.

        >>> (client.prompts.get("polite")).text
        'Answer politely.'

        Args:
            name: name of the prompt.
            version: its number, or an alias such as `best`.

        Raises:
            ResourceNotFound: if there is none.
        """
        return self._call(self._aio.get(name, version=version))

    def list(self) -> Iterator[Prompt]:
        """Yields the latest version of every prompt, without text.

        >>> [each.version for each in client.prompts.list()]
        [1]
        """
        return self._iterate(self._aio.list())

    def versions(self, name: str) -> Iterator[Prompt]:
        """Yields the versions of a prompt, newest first, without text.

        Raises:
            ResourceNotFound: if there is none.
        """
        return self._iterate(self._aio.versions(name))

    @property
    def aio(self) -> AsyncPrompts:
        """The same, asynchronous, over the same connection."""
        return self._aio


class Models(Face):
    """Models: the versions of policies, which were trained, and those that are uploaded to begin a training with."""

    _wraps = AsyncModels
    _aio: AsyncModels

    def get(self, policy: str, *, version: int | str = "latest") -> Model:
        """Returns a version of a policy.

        Args:
            policy: name of the policy.
            version: its number, or an alias.

        Raises:
            ResourceNotFound: if there is none.
        """
        return self._call(self._aio.get(policy, version=version))

    def list(self) -> Iterator[Model]:
        """Yields the latest version of every policy, without its description.

        >>> [model.policy for model in client.models.list()]
        []
        """
        return self._iterate(self._aio.list())

    def versions(self, policy: str) -> Iterator[Model]:
        """Yields the versions of a policy, newest first, without their descriptions.

        Raises:
            ResourceNotFound: if there is none.
        """
        return self._iterate(self._aio.versions(policy))

    def upload(
        self, folder: str | PathLike[str], *, name: str = "", on_progress: Progress = lambda done, total: None
    ) -> str:
        """Uploads a folder in the format of `transformers`, or what the deployment lacks of it; returns what `base` takes.

        Call it again to resume an interrupted upload.

        Args:
            folder: the folder; files that are not read as data, such as pickles, are left out.
            name: name of the model, 1 to 63 of [a-z0-9._-]; without one it is found by its digest.
            on_progress: called with the bytes that have arrived and their total, in a thread of the client.

        Returns:
            `model:{name}`, or `model:{digest}`.

        Raises:
            ArgumentInvalid: if it cannot be a model; lists all problems.
            ModelExists: if the name belongs to another model.
            QuotaExceeded: if the project has no room for it.
            TransferFailed: if a file changes while it is read.
        """
        return self._call(self._aio.upload(folder, name=name, on_progress=on_progress))

    def download(
        self,
        model: str | Named,
        folder: str | PathLike[str],
        *,
        full: bool = False,
        on_progress: Progress = lambda done, total: None,
    ) -> Path:
        """Downloads weights; the folder appears once all of it is there and verified.

        Args:
            model: a version of a policy, its name or its record, or `model:{name}` for one that was uploaded.
            folder: the new folder, which is not there or empty.
            full: of a policy that was trained as adapters, all weights instead, merged.
            on_progress: called with the bytes that have arrived and their total.

        Returns:
            The folder.

        Raises:
            ModelNotFound: if there is no such model, or its weights are gone.
            WeightsUnavailable: if the adapters are merged nowhere.
            TransferFailed: if the folder is taken.
        """
        return self._call(self._aio.download(model, folder, full=full, on_progress=on_progress))

    def export(
        self, model: str | Named, folder: str | PathLike[str], *, on_progress: Progress = lambda done, total: None
    ) -> Path:
        """Downloads a trained model, all weights, and writes a model card (README.md) from the report of its run beside them.

        Args:
            model: a version of a policy: its name or its record, such as `run.model()`.
            folder: the new folder, which is not there or empty.
            on_progress: called with the bytes that have arrived and their total.

        Returns:
            The folder, which other programs load and `push` takes.

        Raises:
            ResourceNotFound: if there is no such version.
            ValueError: if it describes no weights.
            ModelNotFound: if its weights are gone.
            WeightsUnavailable: if it consists of adapters that are merged nowhere.
            TransferFailed: if the folder is taken.
        """
        return self._call(self._aio.export(model, folder, on_progress=on_progress))

    def push(self, folder: str | PathLike[str], repository: str, *, public: bool = False) -> str:
        """Uploads an exported model to a repository of a hub, which is created if need be.

        Server and token are those of huggingface_hub: HF_ENDPOINT, HF_TOKEN, `hf auth login`.

        Args:
            folder: a folder that `export` has written.
            repository: `organisation/name`, also with `@branch`.
            public: whether a new repository is public.

        Returns:
            The URL of the commit.

        Raises:
            ExtraMissing: if huggingface_hub is not installed.
            ValueError: if it is no name of a repository.
            FileNotFoundError: if the folder holds no model.
            PushFailed: if the hub refuses, or cannot be reached.
        """
        return self._call(self._aio.push(folder, repository, public=public))

    @property
    def aio(self) -> AsyncModels:
        """The same, asynchronous, over the same connection."""
        return self._aio
