"""The path of a request, normalised once: which API, model and attempt it names.

Three forms are accepted for each API, for clients that can be given a base URL only:

- `/v1/chat/completions`, or without `/v1`, for base URLs that lack it
- `/openai/deployments/{model}/chat/completions` or `/openai/{...}`, as clients of Azure OpenAI send it. The deployment
  is the model's name. `api-version` is not read: the proxy serves one version of each API.
- either of them after `/projects/{p}/rollouts/{r}/attempts/{n}`, which names the attempt.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from fulmen.errors import ArgumentInvalid, AttemptNotFound
from fulmen.ids import AttemptName, parse_attempt_name
from fulmen_llm_proxy.apis.api import UNREADABLE, decode_fields, encode, wrong
from fulmen_llm_proxy.apis.registry import APIS

_ATTEMPT_PREFIX = "/projects/"
_ATTEMPT_PARTS = 7
"""Parts of a path that names an attempt: empty, the six of its name, then the path of an API."""

_API_ROOTS = ("/v1/", "/openai/")
_AZURE_ROOT = "/openai/"
_DEPLOYMENTS = "deployments/"
_VERSION = "v1/"
_WITHOUT_VERSION = frozenset({"/models", *(api.path for api in APIS.values())})
_BELOW_WITHOUT_VERSION = ("/models/", "/responses/")


@dataclass(frozen=True, slots=True)
class RequestPath:
    """A normalised path.

    Attributes:
        api: the path in OpenAI's own form, such as `/v1/chat/completions`; any other path as received.
        deployment: the model that an Azure-style path names; empty if none.
        attempt_name: unverified name of the attempt; empty if the path names none.
    """

    api: str
    deployment: str = ""
    attempt_name: str = ""

    def attempt(self) -> AttemptName | None:
        """Returns the attempt that the path names, or None.

        Raises:
            AttemptNotFound: if the name is not an attempt's.
        """
        if not self.attempt_name:
            return None
        try:
            return parse_attempt_name(self.attempt_name)
        except ArgumentInvalid:
            raise AttemptNotFound(
                "The URL names no attempt; expected /projects/{project}/rollouts/{id}/attempts/{number}/v1/...."
            ) from None


def parse_path(path: str) -> RequestPath:
    """Normalises the path of a request."""
    attempt_name = ""
    if path.startswith(_ATTEMPT_PREFIX):
        parts = path.split("/", _ATTEMPT_PARTS)
        attempt_name = "/".join(parts[1:_ATTEMPT_PARTS])
        rest = "/" + parts[_ATTEMPT_PARTS] if len(parts) > _ATTEMPT_PARTS else ""
        if rest.startswith(_API_ROOTS) or _lacks_version(rest):
            path = rest
    if _lacks_version(path):
        path = f"/v1{path}"
    if not path.startswith(_AZURE_ROOT):
        return RequestPath(path, "", attempt_name)
    rest, deployment = path.removeprefix(_AZURE_ROOT), ""
    if rest.startswith(_DEPLOYMENTS):
        deployment, _, rest = rest.removeprefix(_DEPLOYMENTS).partition("/")
    return RequestPath("/v1/" + rest.removeprefix(_VERSION), deployment, attempt_name)


def _lacks_version(path: str) -> bool:
    return path in _WITHOUT_VERSION or path.startswith(_BELOW_WITHOUT_VERSION)


def with_model(body: bytes, model: str) -> bytes:
    """Returns a request's body with the model that its path names, which takes precedence.

    Raises:
        ArgumentInvalid: if the body is not a JSON object.
    """
    try:
        fields = decode_fields(body)
    except UNREADABLE as error:
        raise ArgumentInvalid(f"The body is not a JSON object: {wrong(error)}.") from None
    fields["model"] = msgspec.Raw(encode(model))
    return encode(fields)
