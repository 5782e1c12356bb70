"""`fulmen calls`: lists, shows, rates and deletes the recorded calls of an app."""

from __future__ import annotations

import json
from typing import Annotated, Any, Final

import typer

from fulmen.ids import call_name, conversation_name
from fulmen.store.v1 import call_pb2
from fulmen.store.v1 import call_service_pb2 as pb
from fulmen_cli.command import Output, OutputOption, new_group, remote_command
from fulmen_cli.connection import Connection
from fulmen_cli.output import as_dict, console, print_json, print_rows, when
from fulmen_cli.printable import printable

__all__ = ["register"]

DEFAULT_LIMIT: Final = 50
FilterOption = Annotated[
    str, typer.Option("--filter", help="Only those that match, such as 'model = assistant AND score > 0.5'.")
]
LimitOption = Annotated[int, typer.Option(min=1, max=1000, help="Maximum number, newest first.")]
ConversationArgument = Annotated[str, typer.Argument(help="Id of the conversation, or its name.")]


def register(app: typer.Typer) -> None:
    """Adds the group."""
    group = new_group("Recorded calls of an app: those without an attempt, on routes that record.")
    remote_command(group, "list")(list_calls)
    remote_command(group, "show")(show)
    remote_command(group, "conversations")(conversations)
    remote_command(group, "rate")(rate)
    remote_command(group, "delete")(delete)
    app.add_typer(group, name="calls")


async def list_calls(
    connection: Connection,
    where: FilterOption = "",
    limit: LimitOption = DEFAULT_LIMIT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists recorded calls, newest first, without their texts.

    Examples:

        fulmen calls list --filter 'model = assistant AND http_status = 200'

        fulmen calls list --filter 'conversation = chat-17'
    """
    request = pb.ListCallsRequest(project=connection.project, filter=where, page_size=limit)
    async with connection.open() as client:
        found = list((await client.calls.ListCalls(request)).calls)
    rows = [
        (
            each.name.rpartition("/")[2], when(each.create_time), each.model, each.backend.removeprefix("backends/"),
            each.error or str(each.http_status), str(each.message_count), f"{_rated(each)}",
            each.conversation.rpartition("/")[2],
        )
        for each in found
    ]  # fmt: skip
    columns = ("call", "time", "model", "backend", "status", "messages", "score", "conversation")
    print_rows(output, columns, rows, messages=found, empty="No calls.", right=("messages",), spare=("backend", "time"))


async def show(
    connection: Connection,
    call: Annotated[str, typer.Argument(help="UUID of the call, or its name.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Shows a recorded call with its texts.

    Example:

        fulmen calls show 01a21dea-b4f4-768e-a115-15b34fe3ea48
    """
    name = call if call.startswith("projects/") else call_name(connection.project, call)
    async with connection.open() as client:
        found = (await client.calls.GetCall(pb.GetCallRequest(name=name))).call
    content = {
        "messages": json.loads(found.content.messages_json or b"[]"),
        "tools": json.loads(found.content.tools_json or b"[]"),
        "answer": json.loads(found.content.answer_json or b"null"),
    }
    if output is Output.JSON:
        found.ClearField("content")
        print_json(as_dict(found) | content)
        return
    screen = console()
    for title, value in (
        ("call", found.name), ("conversation", found.conversation), ("model", found.model), ("backend", found.backend),
        ("status", found.error or found.http_status), ("time", when(found.create_time)),
        ("expires", when(found.expire_time)), ("score", _rated(found)), ("label", found.label),
    ):  # fmt: skip
        if value:
            screen.print(f"{title:<14}{printable(str(value))}", markup=False, soft_wrap=True)
    for message in (*content["messages"], content["answer"] or {}):
        screen.print(f"\n{printable(_shown(message))}", markup=False, soft_wrap=True)


async def conversations(
    connection: Connection,
    where: FilterOption = "",
    limit: LimitOption = DEFAULT_LIMIT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lists conversations, newest first.

    Example:

        fulmen calls conversations --filter 'call_count > 3 AND score < 0.5'
    """
    request = pb.ListConversationsRequest(project=connection.project, filter=where, page_size=limit)
    async with connection.open() as client:
        found = list((await client.calls.ListConversations(request)).conversations)
    rows = [
        (
            each.name.rpartition("/")[2],
            each.model,
            str(each.call_count),
            _rated(each),
            each.label,
            when(each.create_time),
        )
        for each in found
    ]
    columns = ("conversation", "model", "calls", "score", "label", "begun")
    print_rows(output, columns, rows, messages=found, empty="No conversations.", right=("calls",))


async def rate(
    connection: Connection,
    conversation: ConversationArgument,
    score: Annotated[
        float | None, typer.Option(help="The score, a number; without it, an earlier score is removed.")
    ] = None,
    label: Annotated[str, typer.Option(help="A label, at most 128 characters.")] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Sets the score and the label of a conversation; replaces earlier ones.

    Example:

        fulmen calls rate chat-17 --score 1 --label "thumbs up"
    """
    request = pb.RateConversationRequest(name=_name(conversation, connection), score=score, label=label)
    async with connection.open() as client:
        rated = (await client.calls.RateConversation(request)).conversation
    if output is Output.JSON:
        print_json(as_dict(rated))
    else:
        console().print(f"Rated {request.name}.", markup=False)


async def delete(
    connection: Connection,
    conversation: Annotated[list[str], typer.Argument(help="Ids of conversations, or their names.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Permanently deletes conversations with all their calls. Data sets made from them are files, and are kept.

    Example:

        fulmen calls delete chat-17 chat-18
    """
    request = pb.DeleteConversationsRequest(names=[_name(each, connection) for each in conversation])
    async with connection.open() as client:
        answer = await client.calls.DeleteConversations(request)
    if output is Output.JSON:
        print_json(as_dict(answer))
    else:
        console().print(f"Deleted {answer.deleted_call_count} calls.", markup=False)


def _name(given: str, connection: Connection) -> str:
    return given if given.startswith("projects/") else conversation_name(connection.project, given)


def _rated(message: call_pb2.RecordedCall | call_pb2.Conversation) -> str:
    return f"{message.score:g}" if message.HasField("score") else ""


def _shown(message: dict[str, Any]) -> str:
    content = message.get("content")
    lines = [content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)] if content else []
    lines += [json.dumps(each, ensure_ascii=False) for each in message.get("tool_calls") or ()]
    return "\n  ".join([f"{message.get('role', 'no answer')}:", *lines])
