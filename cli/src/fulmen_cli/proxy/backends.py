"""`fulmen proxy backend`: model servers are added, drained, held for new weights, removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer
from google.protobuf.duration_pb2 import Duration

from fulmen.llm_proxy.v1 import backend_pb2, backend_service_pb2
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.output import as_dict, console, enum_word, print_json, when
from fulmen_cli.proxy.routes import backend_name, raise_problems

__all__ = ["add", "delete", "drain", "hold", "release", "resume", "traits"]

IdArgument = Annotated[str, typer.Argument(metavar="BACKEND", help="Such as vllm-0, or backends/vllm-0.")]


class Dialect(StrEnum):
    """The API that a backend speaks."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    AZURE_OPENAI = "azure-openai"
    LITELLM = "litellm"


class Engine(StrEnum):
    """What runs at a backend."""

    VLLM = "vllm"
    SGLANG = "sglang"
    FULMEN = "fulmen"


class Api(StrEnum):
    """One kind of call."""

    CHAT_COMPLETIONS = "chat-completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"
    EMBEDDINGS = "embeddings"
    MESSAGES = "messages"
    COUNT_TOKENS = "count-tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """The settings of a backend."""

    dialect: Annotated[Dialect, typer.Option(help="API dialect.")] = Dialect.OPENAI
    provider: Annotated[
        str, typer.Option(help="LiteLLM's name of the vendor, such as gemini or bedrock, for --dialect litellm.")
    ] = ""
    region: Annotated[str, typer.Option(help="Region of that vendor, if its address does not name it.")] = ""
    engine: Annotated[Engine | None, typer.Option(help="Inference engine, if known.")] = None
    api: Annotated[
        list[Api] | None,
        typer.Option("--api", help="API that it serves natively, if not the dialect's usual ones. May be repeated."),
    ] = None
    api_version: Annotated[str, typer.Option(help="API version; required by Azure.")] = ""
    key_name: Annotated[
        str,
        typer.Option(
            help="Name of its API key, as in `fulmen secret set NAME`, or of an entry of FULMEN_LLM_PROXY_BACKEND_KEYS."
        ),
    ] = ""
    token_ids: Annotated[bool, typer.Option("--token-ids", help="Its answers can include token ids.")] = False
    rpm: Annotated[
        int | None, typer.Option(min=1, help="Requests per minute over all proxies; by default unlimited.")
    ] = None
    tpm: Annotated[
        int | None, typer.Option(min=1, help="Tokens per minute over all proxies; by default unlimited.")
    ] = None
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Concurrent requests of each proxy process; by default 1024.")
    ] = None
    health_path: Annotated[str, typer.Option(help="Path of the health check, if not the engine's own.")] = ""
    header: Annotated[
        list[str] | None,
        typer.Option("--header", help="NAME=VALUE: a further header of every request to it. May be repeated."),
    ] = None
    drop_params: Annotated[
        bool,
        typer.Option("--drop-params", help="Drop parameters that its API cannot express; otherwise refuse such calls."),
    ] = False


async def add(
    connection: Connection,
    backend: IdArgument,
    url: Annotated[str, typer.Argument(help="Base URL, such as http://10.0.0.7:8000/v1.")],
    options: BackendOptions,
    output: OutputOption = Output.TABLE,
) -> None:
    """Adds or replaces a backend; a drain or hold ends.

    Examples:

        fulmen proxy backend add vllm-0 http://10.0.0.7:8000/v1 --engine vllm --token-ids --max-in-flight 256

        fulmen proxy backend add claude https://api.anthropic.com --dialect anthropic --key-name anthropic --rpm 1000

        fulmen proxy backend add gemini https://generativelanguage.googleapis.com --dialect litellm --provider gemini --key-name gemini

        fulmen proxy backend add router https://openrouter.ai/api/v1 --key-name openrouter --header X-Title=Support
    """
    problems: list[str] = []
    headers = parse_headers(options.header or (), problems)
    raise_problems(problems)
    message = backend_pb2.Backend(
        name=backend_name(backend),
        base_url=url,
        dialect=backend_pb2.Dialect.Value(f"DIALECT_{options.dialect.name}"),
        apis=[backend_pb2.Api.Value(f"API_{each.name}") for each in options.api or ()],
        api_version=options.api_version,
        key_name=options.key_name,
        returns_token_ids=options.token_ids,
        requests_per_minute=options.rpm,
        tokens_per_minute=options.tpm,
        max_in_flight=options.max_in_flight,
        health_path=options.health_path,
        headers=headers,
        drop_params=options.drop_params,
        provider=options.provider,
        region=options.region,
    )
    if options.engine is not None:
        message.engine = backend_pb2.Engine.Value(f"ENGINE_{options.engine.name}")
    async with connection.open() as client:
        answer = await client.backends.RegisterBackend(backend_service_pb2.RegisterBackendRequest(backend=message))
    _show(answer.backend, output)


def parse_headers(given: Sequence[str], problems: list[str]) -> dict[str, str]:
    """Returns headers of the form NAME=VALUE by name; adds what is wrong to `problems`."""
    headers: dict[str, str] = {}
    for each in given:
        name, separator, value = each.partition("=")
        if not separator or name in headers:
            problems.append(
                f"--header {each}: {'is not of the form NAME=VALUE' if not separator else 'is given twice'}."
            )
        headers[name] = value
    return headers


async def drain(connection: Connection, backend: IdArgument, output: OutputOption = Output.TABLE) -> None:
    """Drains a backend: no new calls, those in flight finish (`fulmen proxy health --watch`).

    Example:

        fulmen proxy backend drain vllm-0
    """
    async with connection.open() as client:
        request = backend_service_pb2.DrainBackendRequest(name=backend_name(backend))
        answer = await client.backends.DrainBackend(request)
    _show(answer.backend, output)


async def resume(connection: Connection, backend: IdArgument, output: OutputOption = Output.TABLE) -> None:
    """Ends a drain: the backend receives calls again.

    Example:

        fulmen proxy backend resume vllm-0
    """
    async with connection.open() as client:
        request = backend_service_pb2.ResumeBackendRequest(name=backend_name(backend))
        answer = await client.backends.ResumeBackend(request)
    _show(answer.backend, output)


async def hold(
    connection: Connection,
    backend: IdArgument,
    ttl: Annotated[float, typer.Option(min=0.001, max=600, help="Maximum duration of the hold, seconds.")] = 60,
    output: OutputOption = Output.TABLE,
) -> None:
    """Holds new calls for a backend in the proxy, for example while its weights change.

    Example:

        fulmen proxy backend hold vllm-0 --ttl 120
    """
    duration = Duration()
    duration.FromNanoseconds(round(ttl * 1e9))
    async with connection.open() as client:
        request = backend_service_pb2.HoldBackendRequest(name=backend_name(backend), ttl=duration)
        answer = await client.backends.HoldBackend(request)
    _show(answer.backend, output)


async def release(connection: Connection, backend: IdArgument, output: OutputOption = Output.TABLE) -> None:
    """Ends a hold: the waiting calls are sent.

    Example:

        fulmen proxy backend release vllm-0
    """
    async with connection.open() as client:
        request = backend_service_pb2.ReleaseBackendRequest(name=backend_name(backend))
        answer = await client.backends.ReleaseBackend(request)
    _show(answer.backend, output)


async def delete(connection: Connection, backend: IdArgument) -> None:
    """Deletes a backend that no route uses.

    Example:

        fulmen proxy backend delete vllm-0
    """
    name = backend_name(backend)
    async with connection.open() as client:
        await client.backends.DeleteBackend(backend_service_pb2.DeleteBackendRequest(name=name))
    console().print(f"Deleted {name}.", markup=False)


def traits(backend: backend_pb2.Backend) -> list[tuple[str, str]]:
    """Returns what is special about a backend, by name; what is unset is left out."""
    limits = [
        f"{backend.requests_per_minute:,} requests a minute" if backend.requests_per_minute else "",
        f"{backend.tokens_per_minute:,} tokens a minute" if backend.tokens_per_minute else "",
        f"{backend.max_in_flight:,} concurrent requests" if backend.max_in_flight else "",
    ]
    apis = [backend_pb2.Api.Name(each).removeprefix("API_").lower().replace("_", "-") for each in backend.apis]
    found = [
        ("file", backend.file),
        ("dialect", _word(backend, "dialect")),
        ("provider", backend.provider),
        ("region", backend.region),
        ("engine", _word(backend, "engine")),
        ("apis", ", ".join(apis)),
        ("api version", backend.api_version),
        ("key", backend.key_name),
        ("token ids", "yes" if backend.returns_token_ids else ""),
        ("limits", ", ".join(each for each in limits if each)),
        ("health path", backend.health_path),
        ("headers", ", ".join(f"{name}={value}" for name, value in sorted(backend.headers.items()))),
        ("drops params", "yes" if backend.drop_params else ""),
        ("draining", "yes" if backend.draining else ""),
        ("held until", f"{when(backend.hold_until_time)} UTC" if backend.HasField("hold_until_time") else ""),
    ]
    return [(name, value) for name, value in found if value]


def _word(backend: backend_pb2.Backend, field: str) -> str:
    return enum_word(backend, field).replace("_", "-")


def _show(backend: backend_pb2.Backend, output: Output) -> None:
    if output is Output.JSON:
        print_json(as_dict(backend))
        return
    screen = console()
    for name, value in [("backend", backend.name), ("base URL", backend.base_url), *traits(backend)]:
        screen.print(f"{name:<14}{value}", markup=False, soft_wrap=True)
