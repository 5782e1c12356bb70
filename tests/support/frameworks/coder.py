"""A model of the tests that repairs a repository with the tools of a harness, and its chat template.

It is deterministic, and does one thing after another: with each result it goes on. Its template renders a turn's calls from their
arguments, read and written anew, as the templates of open models do, so that a harness which sends them spaced in another way is
still one conversation.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from tests.support.frameworks.model import text_of
from tests.support.llm_proxy.backend import Backend, Completion, call_of

JSON = dict[str, Any]
FILE = "calc.py"
FIX = f"sed -i 's/a - b/a + b/' {FILE}"
LOOK = f"cat {FILE}"
ANSWER = "add adds now."
QUESTION = "How many lines has calc.py?"
"""What it asks an agent of its own, where a harness lets it start one."""

COUNT = "It has two lines."
WAIT_MS = 30_000
"""How long Codex waits for a command before it tells the model that it still runs."""

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""By which mini-swe-agent has a model end."""


def repair(body: JSON) -> str | list[JSON]:
    """Returns the next thing that it does, by the tools that it is offered."""
    messages = body["messages"]
    results = [text_of(message) for message in messages if message["role"] == "tool"]
    steps = _steps({tool["function"]["name"] for tool in body["tools"]})
    return [call_of(*steps[len(results)], len(results) + 1)] if len(results) < len(steps) else ANSWER


def delegate(body: JSON) -> str | list[JSON]:
    """Starts an agent of its own, of Codex, waits for it, and says what it found."""
    messages = body["messages"]
    if any(text_of(message) == QUESTION for message in messages):
        return COUNT
    results = [text_of(message) for message in messages if message["role"] == "tool"]
    match len(results):
        case 0:
            return [call_of("multi_agent_v1__spawn_agent", {"message": QUESTION})]
        case 1:
            waited = {"targets": [json.loads(results[0])["agent_id"]], "timeout_ms": 60_000}
            return [call_of("multi_agent_v1__wait_agent", waited, 2)]
        case _:
            return f"I was told: {results[1]}"


def _steps(tools: set[str]) -> list[tuple[str, JSON]]:
    if "Edit" in tools:
        edit = {"file_path": FILE, "old_string": "a - b", "new_string": "a + b"}
        return [("Bash", {"command": LOOK, "description": "Look"}), ("Read", {"file_path": FILE}), ("Edit", edit)]
    if "exec_command" in tools:
        return [("exec_command", {"cmd": command, "yield_time_ms": WAIT_MS}) for command in (LOOK, FIX)]
    return [("bash", {"command": command}) for command in (LOOK, FIX, SUBMIT)]


class Coder(Backend):
    """A server whose prompts are rendered by a template that has calls in it, and only appends."""

    def _complete(self, body: JSON) -> Completion:
        return dataclasses.replace(super()._complete(body), prompt_ids=template_of(body["messages"]))


def template_of(messages: list[JSON]) -> list[int]:
    """Returns the token ids of a prompt: the bytes of `<role>content` lines, and the beginning of the model's turn."""
    return list(("".join(map(_line, messages)) + "<assistant>").encode())


def _line(message: JSON) -> str:
    calls = [json.dumps(json.loads(call["function"]["arguments"])) for call in message.get("tool_calls") or ()]
    return f"<{message['role']}>{text_of(message)}{''.join(calls)}\n"
