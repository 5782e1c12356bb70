"""The dialects of agents: how each asks, and how the vendor's own client reads what comes back."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

import anthropic
import openai
from anthropic.types import Message
from openai.lib.streaming.chat._completions import ChatCompletionStreamState
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import BaseModel

from tests.support.llm_proxy.vendor_world import VendorWorld

Turn = dict[str, Any]

SCHEMA = {"type": "object", "properties": {"input": {"type": "string"}}}


class StreamFailed(Exception):
    """A stream of a response ended with an event that says that it failed."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a tool."""

    id: str
    name: str
    arguments: Turn


@dataclass(frozen=True, kw_only=True)
class Said:
    """An answer as the client read it.

    Attributes:
        end: `stop`, `length` or `tools`.
        turns: what the agent adds to the conversation.
        shown: everything that the client was given, as JSON.
    """

    text: str
    calls: list[Call]
    end: str
    input_tokens: int
    output_tokens: int
    turns: list[Turn]
    shown: str


class Dialect(ABC):
    """One API, as its vendor's client speaks it."""

    name: ClassVar[str]
    errors: ClassVar[ModuleType]

    @abstractmethod
    def agent(self, world: VendorWorld, key: str | None = None) -> Any:
        """Returns the vendor's client."""

    @abstractmethod
    def tool(self, name: str) -> Turn:
        """Returns a tool."""

    @abstractmethod
    def result(self, call: Call, output: str) -> Turn:
        """Returns the result of a call, as a turn or a part of one."""

    def results(self, calls: Sequence[Call], output: str) -> list[Turn]:
        """Returns the turns that hand results back."""
        return [self.result(call, output) for call in calls]

    @abstractmethod
    async def say(
        self, agent: Any, model: str, turns: list[Turn], *, stream: bool = False, limit: int = 64, **more: Any
    ) -> Said:
        """Makes a call and reads its answer.

        Args:
            limit: maximum tokens of the answer.
            more: further fields of the request.
        """


class Chat(Dialect):
    """Chat completions."""

    name = "chat"
    errors: ClassVar = openai

    def agent(self, world: VendorWorld, key: str | None = None) -> openai.AsyncOpenAI:
        """Returns the vendor's client."""
        return world.openai_agent(key)

    def tool(self, name: str) -> Turn:
        """Returns a tool."""
        return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}

    def result(self, call: Call, output: str) -> Turn:
        """Returns the result of a call."""
        return {"role": "tool", "tool_call_id": call.id, "content": output}

    async def say(
        self, agent: Any, model: str, turns: list[Turn], *, stream: bool = False, limit: int = 64, **more: Any
    ) -> Said:
        """Makes a call and reads its answer."""
        fields: Any = {"model": model, "messages": turns, "max_completion_tokens": limit} | more
        if stream:
            state, shown = ChatCompletionStreamState(), ""
            options = {"include_usage": True}
            async for chunk in await agent.chat.completions.create(**fields, stream=True, stream_options=options):
                state.handle_chunk(chunk)
                shown += chunk.model_dump_json()
            answer = state.current_completion_snapshot
        else:
            answer = await agent.chat.completions.create(**fields)
            strict(ChatCompletion, answer)
            shown = answer.model_dump_json()
        [choice] = answer.choices
        message = choice.message.model_dump(exclude_unset=True, exclude_none=True, exclude={"annotations", "parsed"})
        for call in message.get("tool_calls", ()):
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        calls = [
            Call(id=call.id, name=call.function.name, arguments=json.loads(call.function.arguments))
            for call in choice.message.tool_calls or ()
        ]
        assert answer.usage is not None
        return Said(
            text=choice.message.content or "",
            calls=calls,
            end={"tool_calls": "tools"}.get(choice.finish_reason, choice.finish_reason),
            input_tokens=answer.usage.prompt_tokens,
            output_tokens=answer.usage.completion_tokens,
            turns=[message],
            shown=shown,
        )


class Responses(Dialect):
    """Responses; every stream is checked for the numbers of its events."""

    name = "responses"
    errors: ClassVar = openai

    def agent(self, world: VendorWorld, key: str | None = None) -> openai.AsyncOpenAI:
        """Returns the vendor's client."""
        return world.openai_agent(key)

    def tool(self, name: str) -> Turn:
        """Returns a tool."""
        return {"type": "function", "name": name, "parameters": SCHEMA, "strict": False}

    def result(self, call: Call, output: str) -> Turn:
        """Returns the result of a call."""
        return {"type": "function_call_output", "call_id": call.id, "output": output}

    async def say(
        self, agent: Any, model: str, turns: list[Turn], *, stream: bool = False, limit: int = 64, **more: Any
    ) -> Said:
        """Makes a call and reads its answer."""
        fields: Any = {"model": model, "input": turns, "max_output_tokens": limit, "store": False} | more
        if stream:
            events = [event async for event in await agent.responses.create(**fields, stream=True)]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            last = events[-1]
            if last.type in ("error", "response.failed"):
                raise StreamFailed(last.message if last.type == "error" else last.response.error.message)
            assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
            answer, shown = last.response, "".join(event.model_dump_json() for event in events)
        else:
            answer = await agent.responses.create(**fields)
            shown = answer.model_dump_json()
        strict(Response, answer)
        found = [item for item in answer.output if item.type == "function_call"]
        calls = [Call(id=one.call_id, name=one.name, arguments=json.loads(one.arguments)) for one in found]
        cut = answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
        return Said(
            text=answer.output_text,
            calls=calls,
            end="length" if cut else "tools" if calls else "stop",
            input_tokens=answer.usage.input_tokens,
            output_tokens=answer.usage.output_tokens,
            turns=[
                item.model_dump(exclude_none=True, exclude={"parsed_arguments", "parsed"}) for item in answer.output
            ],
            shown=shown,
        )


class Messages(Dialect):
    """Anthropic's messages."""

    name = "messages"
    errors: ClassVar = anthropic

    def agent(self, world: VendorWorld, key: str | None = None) -> anthropic.AsyncAnthropic:
        """Returns the vendor's client."""
        return world.anthropic_agent(key)

    def tool(self, name: str) -> Turn:
        """Returns a tool."""
        return {"name": name, "input_schema": SCHEMA}

    def result(self, call: Call, output: str) -> Turn:
        """Returns the result of a call, a block."""
        return {"type": "tool_result", "tool_use_id": call.id, "content": output}

    def results(self, calls: Sequence[Call], output: str) -> list[Turn]:
        """Returns the turn that hands results back."""
        return [{"role": "user", "content": super().results(calls, output)}]

    async def say(
        self, agent: Any, model: str, turns: list[Turn], *, stream: bool = False, limit: int = 64, **more: Any
    ) -> Said:
        """Makes a call and reads its answer."""
        fields: Any = {"model": model, "messages": turns, "max_tokens": limit} | more
        if stream:
            shown = ""
            async with agent.messages.stream(**fields) as events:
                async for event in events:
                    shown += event.model_dump_json()
                answer = await events.get_final_message()
        else:
            answer = await agent.messages.create(**fields)
            strict(Message, answer)
            shown = answer.model_dump_json()
        return Said(
            text="".join(block.text for block in answer.content if block.type == "text"),
            calls=[
                Call(id=block.id, name=block.name, arguments=block.input)
                for block in answer.content
                if block.type == "tool_use"
            ],
            end={"max_tokens": "length", "tool_use": "tools", "end_turn": "stop"}.get(answer.stop_reason, ""),
            input_tokens=answer.usage.input_tokens,
            output_tokens=answer.usage.output_tokens,
            turns=[{"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in answer.content]}],
            shown=shown,
        )


CHAT, RESPONSES, MESSAGES = Chat(), Responses(), Messages()
DIALECTS = (CHAT, RESPONSES, MESSAGES)


def strict(model: type[BaseModel], answer: BaseModel) -> None:
    """Has pydantic check every field, which the client parsed leniently."""
    model.model_validate(answer.model_dump(mode="json", by_alias=True, exclude_unset=True))
