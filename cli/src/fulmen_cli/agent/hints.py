"""Hints on common mistakes, derived from what an agent did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fulmen_cli.agent.recording import CallRecord

__all__ = ["Attempt", "hints"]

UNAUTHORIZED: Final = (401, 403)
NOT_FOUND: Final = 404
NO_REWARD: Final = "REWARD_MISSING"
_VENDORS: Final = (
    "api.openai.com", "api.anthropic.com", "generativelanguage.googleapis.com", "api.mistral.ai", "api.groq.com",
    "api.together.xyz", "openrouter.ai", "api.deepseek.com", "api.cohere.com", "api.x.ai", "openai.azure.com",
)  # fmt: skip


_UNREACHED: Final = ("APIConnectionError", "ConnectError", "ConnectionRefusedError", "ConnectionError", "ECONNREFUSED")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What hints are made from.

    Attributes:
        ended: The ended attempt, as the runner reports it.
        calls: Its model calls.
        refused: Paths of calls that came with a wrong key.
        hosts: Hosts that this process looked up meanwhile.
        in_process: Whether the agent is a Python callable, which can return a reward.
        judged: Whether something other than the agent scores.
    """

    ended: Mapping[str, Any]
    calls: Sequence[CallRecord]
    refused: Sequence[str]
    hosts: frozenset[str]
    in_process: bool
    judged: bool


def hints(attempt: Attempt) -> list[str]:
    """Returns hints, the most likely first."""
    found = [*_about_reward(attempt), *_about_calls(attempt)]
    failure = attempt.ended.get("failure") or {}
    message = str(failure.get("message", ""))
    if "ModuleNotFoundError" in message or "No module named" in message:
        found.append(
            'A module is missing: name the agent\'s packages in [agent], requirements = "requirements.txt", or an environment '
            'of this machine, venv = ".venv"; or install them where the runners are.'
        )
    if "BdbQuit" in message:
        found.append("The debugger was left with `quit`: use `continue` to resume the agent.")
    if "outside of an attempt" in message:
        found.append("A model was called at import time: call it from the agent's function.")
    return found


def _about_reward(attempt: Attempt) -> list[str]:
    failure = attempt.ended.get("failure") or {}
    if failure.get("kind") != NO_REWARD:
        return []
    if attempt.judged:
        return ["The grader gave no reward: return a number, or a mapping from dimension to number."]
    ways = (
        "return a number, call `fulmen.emit_reward(0.5)`"
        if attempt.in_process
        else "print a number, or a JSON object of numbers, as the last line, run `fulmen emit reward 0.5`"
    )
    return [f'No reward: {ways}, or set a grader (grader = "grader.py:grade" in [agent], or --grader).']


def _about_calls(attempt: Attempt) -> list[str]:
    found = []
    past = sorted(host for host in attempt.hosts if any(host == each or host.endswith(f".{each}") for each in _VENDORS))
    if past:
        found.append(
            f"The agent called {', '.join(past)} directly: calls that bypass the proxy are not captured and cannot be trained on. "
            "Remove base_url (or the host) from its code: clients read OPENAI_BASE_URL and ANTHROPIC_BASE_URL."
        )
    if attempt.refused:
        found.append(
            f"{len(attempt.refused)} model call{'s' if len(attempt.refused) > 1 else ''} did not use the attempt's "
            "key and were refused with 401: let the client read OPENAI_API_KEY or ANTHROPIC_API_KEY instead of a key in the code."
        )
    failure = attempt.ended.get("failure") or {"kind": NO_REWARD}
    if failure["kind"] == NO_REWARD and not (attempt.calls or attempt.refused or past):
        found.append(
            "No model call: the agent must use OPENAI_BASE_URL (with OPENAI_API_KEY) or "
            "ANTHROPIC_BASE_URL (with ANTHROPIC_API_KEY) of its environment. Without model calls there is nothing to train."
        )
    unreached = any(each in str(failure.get("message", "")) for each in _UNREACHED)
    if unreached and not (attempt.calls or attempt.refused or past):
        found.append(
            "The agent could not connect, and no call reached the model: remove base_url or a host from its code. Clients read OPENAI_BASE_URL and ANTHROPIC_BASE_URL."
        )
    statuses = {call.status for call in attempt.calls}
    if statuses & set(UNAUTHORIZED):
        found.append("The model's endpoint refused the key: check --api-key (or OPENAI_API_KEY).")
    if NOT_FOUND in statuses:
        models = sorted({call.model for call in attempt.calls if call.status == NOT_FOUND and call.model})
        found.append(
            f"The endpoint does not know {', '.join(models) or 'the model'}: replace the agent's model with `--model NAME`, use `--fake-model`, or see `fulmen proxy routes` for the stack's."
        )
    if any(call.usage.completion is None and call.status < min(UNAUTHORIZED) for call in attempt.calls):
        found.append('An answer had no token counts: OpenAI streams need stream_options={"include_usage": true}.')
    return found
