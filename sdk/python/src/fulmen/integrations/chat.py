"""Model calls of integrations. They use only the standard library, since they run in agents' own environments."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from fulmen.agent import Context

__all__ = ["ModelCallFailed", "complete", "text_of"]


class ModelCallFailed(RuntimeError):
    """The proxy refused a model call or could not be reached."""


def complete(context: Context, model: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """Asks the model for the next message of a conversation; blocks.

    Args:
        context: The attempt, whose key and address are used.
        model: The model's name.
        messages: The conversation.
        options: Further fields of the request, such as `max_tokens`.

    Raises:
        ModelCallFailed: If there is no answer; with the proxy's message.
    """
    body = json.dumps({"model": model, "messages": list(messages), **options}).encode()
    headers = {"Authorization": f"Bearer {context.api_key}", "Content-Type": "application/json"}
    # The runner's own URL, of HTTP.
    request = urllib.request.Request(  # noqa: S310
        f"{context.openai_base_url}/chat/completions", data=body, headers=headers
    )
    try:
        with urllib.request.urlopen(request, timeout=max(1.0, context.remaining_s)) as answer:  # noqa: S310
            message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
            return message
    except urllib.error.HTTPError as error:
        text = error.read(2000).decode(errors="replace")
        raise ModelCallFailed(f"The model call failed with status {error.code}: {text}") from None
    except (OSError, ValueError, LookupError, TypeError, RecursionError, http.client.HTTPException) as error:
        raise ModelCallFailed(f"The model call failed: {type(error).__name__}: {error}") from None


def text_of(message: Mapping[str, Any]) -> str:
    """Returns the text of a message; empty if it has none."""
    return str(message.get("content") or "")
