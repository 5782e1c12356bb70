"""Versions of resources as records; policies and prompts among them."""

from __future__ import annotations

import datetime
import json
from typing import Any, ClassVar

from fulmen.client.rollouts import decoded
from fulmen.client.view import View
from fulmen.messages import moment
from fulmen.store.v1 import resource_pb2

__all__ = ["Model", "Prompt", "Resource"]


class Resource(View[resource_pb2.ResourceVersion]):
    """An immutable version of a resource."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("name", "kind")

    @property
    def name(self) -> str:
        """`resources/{id}/versions/{n}`."""
        return str(self.proto.name)

    @property
    def id(self) -> str:
        """Id of the resource, such as `agent.arithmetic`."""
        return self.name.split("/")[1]

    @property
    def version(self) -> int:
        """Number of the version, from 1."""
        return int(self.proto.version)

    @property
    def kind(self) -> str:
        """`prompt`, `agent`, `bundle`, `dataset`, `policy`, `route`, `backend`, `scores` or a kind of your own."""
        return str(self.proto.kind)

    @property
    def content(self) -> bytes:
        """The content; empty in lists, which leave it out."""
        return bytes(self.proto.content)

    @property
    def text(self) -> str:
        """The content as text.

        Raises:
            UnicodeDecodeError: if it is not UTF-8.
        """
        return self.content.decode()

    @property
    def json(self) -> Any:
        """The content as Python values.

        Raises:
            ValueError: if it is not JSON.
        """
        return json.loads(self.content)

    @property
    def value(self) -> Any:
        """The content by its media type: JSON as Python values, text as str, otherwise bytes."""
        return decoded(self.content, self.proto.content_type or "application/octet-stream")

    @property
    def size_bytes(self) -> int:
        """Size of the content."""
        return int(self.proto.size_bytes)

    @property
    def parent(self) -> str:
        """The version that this one was made from; empty if there is none."""
        return str(self.proto.parent)

    @property
    def metadata(self) -> dict[str, str]:
        """The metadata that it was published with."""
        return dict(self.proto.metadata)

    @property
    def create_time(self) -> datetime.datetime | None:
        """When it was published, UTC."""
        return moment(self.proto.create_time)


class Prompt(Resource):
    """A version of a prompt: a resource `prompt.{name}` whose content is text."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("name",)


class Model(Resource):
    """A version of a policy: a resource `policy.{name}` that describes weights."""

    __slots__ = ()
    _shown: ClassVar[tuple[str, ...]] = ("name", "path")

    @property
    def policy(self) -> str:
        """Name of the policy, which is also the public model name of its route."""
        return self.id.removeprefix("policy.")

    @property
    def path(self) -> str:
        """Folder of the weights on the host of the algorithm service; empty in lists, which leave it out."""
        return str(self.json.get("path", "")) if self.content else ""
