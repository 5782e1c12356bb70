"""The arguments with which LiteLLM is called: a request's fields that it is given, and the vendor's address, region and key."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from fulmen_llm_proxy.backends.litellm.worker.failures import CallFailed, document_of

__all__ = ["CHAT", "EMBED", "Kind", "Vendor", "arguments_of"]


@dataclass(frozen=True, kw_only=True)
class Vendor:
    """Which vendor is called: its name in LiteLLM's words, its address, and its region where the address has none."""

    provider: str
    base_url: str
    region: str


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of call.

    Attributes:
        fields: fields of a request that LiteLLM is given. Others would be its own arguments, such as `api_base`.
        paths: paths that LiteLLM expects in the address of a vendor, where the address has none.
    """

    fields: frozenset[str]
    paths: Mapping[str, str]
    streams: bool


CHAT: Final = Kind(
    fields=frozenset(
        {"frequency_penalty", "function_call", "functions", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens",
         "messages", "n", "parallel_tool_calls", "presence_penalty", "reasoning_effort", "response_format", "seed", "stop",
         "stream_options", "temperature", "thinking", "tool_choice", "tools", "top_k", "top_logprobs", "top_p", "user"}
    ),
    paths={"cohere": "/v2/chat", "cohere_chat": "/v2/chat", "gemini": "/v1beta"},
    streams=True,
)  # fmt: skip
EMBED: Final = Kind(
    fields=frozenset({"dimensions", "encoding_format", "input", "user"}),
    paths={"cohere": "/v2/embed", "gemini": "/v1beta"},
    streams=False,
)

_AWS_NAMES: Final = ("aws_access_key_id", "aws_secret_access_key", "aws_session_token")
_REGIONS: Final = {
    "bedrock": re.compile(r"bedrock-runtime(?:-fips)?\.([a-z0-9-]+)\."),
    "vertex_ai": re.compile(r"([a-z0-9-]+)-aiplatform\."),
}


def arguments_of(
    vendor: Vendor, kind: Kind, body: Mapping[str, Any], *, key: str, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns LiteLLM's arguments for a request.

    Args:
        body: the request, in the form of OpenAI's API.
        options: `drop_params` and `headers` of the backend.

    Raises:
        CallFailed: if the request has fields that LiteLLM is not given; names all of them.
    """
    drops = bool(options.get("drop_params"))
    unknown = sorted(body.keys() - kind.fields - {"model", "stream"})
    if unknown and not drops:
        text = f"Not possible through LiteLLM: {', '.join(unknown)[:500]}. With `drop_params` of the backend they are dropped."
        raise CallFailed(400, "unsupported_parameters", text)
    arguments = {name: value for name, value in body.items() if name in kind.fields and value is not None}
    arguments |= {"model": f"{vendor.provider}/{body.get('model', '')}", "drop_params": drops}
    arguments |= {"max_retries": 0, "num_retries": 0}
    if kind.streams and body.get("stream"):
        arguments["stream"] = True
    if options.get("headers"):
        arguments["extra_headers"] = options["headers"]
    return arguments | _of_vendor(vendor, kind, key)


def _of_vendor(vendor: Vendor, kind: Kind, key: str) -> dict[str, Any]:
    base = vendor.base_url.rstrip("/")
    if not urlsplit(base).path:
        base += kind.paths.get(vendor.provider, "")
    named = _REGIONS[vendor.provider].search(base) if vendor.provider in _REGIONS else None
    region = vendor.region or (named.group(1) if named else "")
    found: dict[str, Any] = {"api_base": base}
    match vendor.provider:
        case "vertex_ai":
            found |= {"vertex_credentials": key, "vertex_project": document_of(key.encode()).get("project_id")}
            return found | ({"vertex_location": region} if region else {})
        case "bedrock":
            account = document_of(key.encode())
            parts: dict[str, Any] = {name: account[name] for name in _AWS_NAMES if name in account}
            found |= parts or {"api_key": key}
            return found | ({"aws_region_name": region} if region else {})
        case _:
            return found | ({"api_key": key} if key else {})
