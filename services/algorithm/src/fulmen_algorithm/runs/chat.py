"""Models that an algorithm itself asks: critics, editors, judges. Any OpenAI-compatible endpoint will do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One question.

    Attributes:
        model: The model's name: a route of the LLM proxy, or a model of the endpoint.
        messages: OpenAI chat messages.
        temperature: Sampling temperature; None leaves it to the model.
        max_tokens: Longest answer, in tokens.
        base_url: An address of the service's `chat_endpoints`, such as `https://api.example.com/v1`; empty for the proxy.
        purpose: Who asks, such as `apo.critic`; the agent name of the call at the proxy.
    """

    model: str
    messages: Sequence[Mapping[str, Any]] = field(repr=False)
    temperature: float | None = None
    max_tokens: int = 1024
    base_url: str = ""
    purpose: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatAnswer:
    """One answer.

    Attributes:
        text: Text of the answer; may be empty.
        prompt_tokens: As the endpoint counts; 0 if it does not say.
        completion_tokens: As the endpoint counts; 0 if it does not say.
    """

    text: str = field(repr=False)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        """All tokens that were paid for."""
        return self.prompt_tokens + self.completion_tokens


class ChatModels(Protocol):
    """Asks models."""

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        """Asks once; waits out limits and outages.

        Raises:
            RunFailed: if the endpoint refuses the question, or stays away too long.
        """
