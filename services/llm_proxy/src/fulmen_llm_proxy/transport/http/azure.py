"""Addresses in the style of Azure OpenAI: its clients may be pointed at the proxy as they are.

`/openai/deployments/{model}/chat/completions`, where the deployment's name is the model's, and
`/openai/{...}` for the APIs that have none. The `api-version` of the query is not read: the proxy
serves one version of each API.
"""

from __future__ import annotations

import msgspec

from fulmen.errors import ArgumentInvalid
from fulmen_llm_proxy.apis.api import UNREADABLE, decode_fields, encode, wrong

_ROOT = "/openai/"
_DEPLOYMENTS = "deployments/"
_VERSION = "v1/"


def standard_path(path: str) -> str:
    """Returns the same API's path in OpenAI's own style; any other path as it is."""
    if not path.startswith(_ROOT):
        return path
    rest = path.removeprefix(_ROOT)
    if rest.startswith(_DEPLOYMENTS):
        rest = rest.removeprefix(_DEPLOYMENTS).partition("/")[2]
    return "/v1/" + rest.removeprefix(_VERSION)


def deployment_in(path: str) -> str:
    """Returns the model that a path names; empty if it names none."""
    found = path.removeprefix(_ROOT + _DEPLOYMENTS)
    return "" if found == path else found.partition("/")[0]


def with_model(body: bytes, model: str) -> bytes:
    """Returns a request's body with the model that the path names, which counts.

    Raises:
        ArgumentInvalid: if the body is not a JSON object.
    """
    try:
        fields = decode_fields(body)
    except UNREADABLE as error:
        raise ArgumentInvalid(f"The body is not a JSON object: {wrong(error)}.") from None
    fields["model"] = msgspec.Raw(encode(model))
    return encode(fields)
