"""`fulmen proxy call`: one model call as a quick trial, over gRPC; the same way through the proxy as an agent's."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from fulmen.llm_proxy.v1 import completion_service_pb2
from fulmen.rpc.services import Services
from fulmen_cli.command import Output, OutputOption
from fulmen_cli.connection import Connection
from fulmen_cli.exits import CommandFailed, Exit
from fulmen_cli.output import console, print_json, print_json_line

__all__ = ["call"]

LIMIT_S: Final = 900.0
DEFAULT_MAX_TOKENS: Final = 1024
OK: Final = 200
BY_STATUS: Final = {400: Exit.USAGE, 404: Exit.NOT_FOUND, 422: Exit.USAGE}
Json = Mapping[str, Any]


class CallApi(StrEnum):
    """The API of the call."""

    CHAT = "chat"
    MESSAGES = "messages"
    RESPONSES = "responses"
    COMPLETIONS = "completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How one API asks and answers."""

    path: str
    prompt: Callable[[str], dict[str, Any]]
    max_tokens: str
    text: Callable[[Json], str]
    piece: Callable[[Json], str]


def _turn(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


def _choice(field: str, within: str) -> Callable[[Json], str]:
    def text(document: Json) -> str:
        choices = _objects(document.get("choices"))
        if not choices:
            return ""
        holder = choices[0].get(within) if within else choices[0]
        return _string(holder.get(field)) if isinstance(holder, dict) else ""

    return text


def _blocks(document: Json) -> str:
    return "".join(_string(block.get("text")) for block in _objects(document.get("content")))


def _items(document: Json) -> str:
    return "".join(_blocks(item) for item in _objects(document.get("output")))


def _delta(document: Json) -> str:
    delta = document.get("delta")
    return _string(delta.get("text")) if isinstance(delta, dict) else ""


def _output_delta(document: Json) -> str:
    return _string(document.get("delta")) if document.get("type") == "response.output_text.delta" else ""


SHAPES: Final = {
    CallApi.CHAT: Shape(
        path="/v1/chat/completions",
        prompt=_turn,
        max_tokens="max_tokens",
        text=_choice("content", "message"),
        piece=_choice("content", "delta"),
    ),
    CallApi.MESSAGES: Shape(
        path="/v1/messages", prompt=_turn, max_tokens="max_tokens", text=_blocks, piece=_delta
    ),
    CallApi.RESPONSES: Shape(
        path="/v1/responses",
        prompt=lambda prompt: {"input": prompt},
        max_tokens="max_output_tokens",
        text=_items,
        piece=_output_delta,
    ),
    CallApi.COMPLETIONS: Shape(
        path="/v1/completions",
        prompt=lambda prompt: {"prompt": prompt},
        max_tokens="max_tokens",
        text=_choice("text", ""),
        piece=_choice("text", ""),
    ),
}  # fmt: skip


async def call(
    connection: Connection,
    model: Annotated[str, typer.Argument(help="Public model name, that is, a route.")],
    prompt: Annotated[str, typer.Argument(help="The prompt; - for standard input.")],
    stream: Annotated[bool, typer.Option("--stream", help="Stream the answer.")] = False,
    api: Annotated[CallApi, typer.Option(help="API of the call.")] = CallApi.CHAT,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help=f"Maximum tokens of the answer; with --api messages by default {DEFAULT_MAX_TOKENS}."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Makes one model call, to try a route or backend; it counts as the token's usage and is not captured.

    The answer is printed on standard output; status, time and tokens on standard error. JSON is the whole answer; for a
    stream, one event per line.

    Examples:

        fulmen proxy call arithmetic "12+34="

        fulmen proxy call judge "Who wrote Faust?" --api messages --stream
    """
    shape = SHAPES[api]
    text = sys.stdin.read() if prompt == "-" else prompt
    body: dict[str, Any] = {"model": model, **shape.prompt(text)}
    if max_tokens is not None or api is CallApi.MESSAGES:
        body[shape.max_tokens] = max_tokens or DEFAULT_MAX_TOKENS
    begun = time.monotonic()
    async with connection.open() as client:
        if stream:
            usage = await _streamed(client, shape, body, as_json=output is Output.JSON)
        else:
            usage = await _whole(client, shape, body, as_json=output is Output.JSON)
    sys.stderr.write(f"{api}, {time.monotonic() - begun:.3f} s{_tokens(usage)}\n")


async def _whole(client: Services, shape: Shape, body: Json, *, as_json: bool) -> Json:
    request = completion_service_pb2.CompleteRequest(path=shape.path, body_json=json.dumps(body).encode())
    answer = await client.completions.Complete(request, timeout=LIMIT_S)
    document = _document(answer.body_json)
    if answer.http_status != OK:
        raise _refusal(answer.http_status, document, answer.retry_after_seconds)
    if as_json:
        print_json(document)
    else:
        console().print(Text(shape.text(document)), soft_wrap=True)
    return _usage(document)


async def _streamed(client: Services, shape: Shape, body: Json, *, as_json: bool) -> Json:
    usage: Json = {}
    screen = console()
    wanted = {**body, "stream": True}
    if shape.path.endswith("/completions"):
        wanted["stream_options"] = {"include_usage": True}
    async for event in _events(client, shape, wanted):
        if as_json:
            print_json_line(event)
        elif piece := shape.piece(event):
            screen.print(Text(piece), end="", soft_wrap=True)
            sys.stdout.flush()
        if (problem := _problem(event)) is not None:
            raise CommandFailed(f"The stream was interrupted: {problem}")
        usage = {**usage, **_usage(event)}
    if not as_json:
        screen.print()
    return usage


async def _events(client: Services, shape: Shape, body: Json) -> AsyncIterator[Json]:
    request = completion_service_pb2.StreamCompleteRequest(path=shape.path, body_json=json.dumps(body).encode())
    stream = client.completions.StreamComplete(request, timeout=LIMIT_S)
    try:
        async for message in stream:
            document = _document(message.event_json)
            if message.http_status not in (0, OK):
                raise _refusal(message.http_status, document, message.retry_after_seconds)
            if document:
                yield document
    finally:
        stream.cancel()


def _document(content: bytes) -> dict[str, Any]:
    """Reads an answer; anything other than a JSON object (`[DONE]`, or a strange backend's text) becomes empty."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _refusal(status: int, document: Json, retry_after_s: float) -> CommandFailed:
    later = f" Try again in {retry_after_s:g} s." if retry_after_s else ""
    message = _problem(document) or "The proxy gave no reason."
    return CommandFailed(f"{status}: {message}{later}", exit_code=BY_STATUS.get(status, Exit.FAILED))


def _problem(document: Json) -> str | None:
    """Returns the error in an answer or event of any dialect, or None."""
    holder = document.get("response") if isinstance(document.get("response"), dict) else document
    error = holder.get("error") if isinstance(holder, dict) else None
    if error:
        message = error.get("message") if isinstance(error, dict) else error
        return _string(message) or "an error without a message"
    return _string(document.get("message")) or "an error" if document.get("type") == "error" else None


def _usage(document: Json) -> Json:
    """Returns the usage in an answer or event of any API."""
    for holder in (document, document.get("response"), document.get("message")):
        if isinstance(holder, dict) and isinstance(holder.get("usage"), dict):
            found: Json = holder["usage"]
            return {name: value for name, value in found.items() if value is not None}
    return {}


def _tokens(usage: Json) -> str:
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    return "" if prompt is None and completion is None else f", {prompt or 0} + {completion or 0} tokens"


def _objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""
