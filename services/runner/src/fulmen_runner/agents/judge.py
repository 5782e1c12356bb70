"""Graders that are language models, asked through the model proxy with the attempt's key; see `domain.judging`.

Invariant: a backend that fails is INFRA, since it is no fault of the agent's; a judge that is refused, or that answers
no scores however often it is asked, is AGENT_ERROR, since its specification asks for what it cannot do.
"""

import asyncio
import json
import math
import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fulmen.agent import GRADER_AGENT, acting_as
from fulmen.emit import emit_annotation
from fulmen_runner.agents.judging import (
    GENERAL_PROMPT,
    BadAnswer,
    Scale,
    Verdict,
    fenced,
    mean_rewards,
    response_format,
    system_prompt,
    verdict_of,
)
from fulmen_runner.agents.python.model_access import AGENT_HEADER
from fulmen_runner.agents.specification import JudgeTarget
from fulmen_runner.agents.templates import expand, placeholders_of
from fulmen_runner.agents.tracing.spans import enter_trace
from fulmen_runner.attempts.errors import AgentFailed, HostUnavailable
from fulmen_runner.attempts.outcome import Reward
from fulmen_runner.attempts.program import Invocation, encode_output

if TYPE_CHECKING:
    import httpx2

MAX_ANSWERS = 3
"""How often a judge is asked for one verdict before its answers are given up."""

MAX_TRIES = 3
"""How often one question is sent to a backend that fails; the proxy has tried others by itself before each."""

RETRY_PAUSE_S = 0.5
MAX_DIMENSIONS = 16
MAX_SAMPLES = 9

_DIMENSION = re.compile(r"[a-z0-9_.-]{1,64}")
_BAD_REQUEST = 400
_PASSING = frozenset({401, 403, 408, 409, 425, 429})
"""Refusals that say nothing about the question: of the attempt's key, or of a limit."""

_Message = dict[str, str]


class JudgeClient:
    """The HTTP client of all judges of a runner; made when the first one is asked."""

    def __init__(self) -> None:
        self._client: httpx2.AsyncClient | None = None

    def open(self) -> "httpx2.AsyncClient":
        """Returns the client."""
        if self._client is None:
            # Imported here: runners without judges do without.
            import httpx2

            self._client = httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None), trust_env=False)
        return self._client

    async def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            await self._client.aclose()


def judge(target: JudgeTarget, client: JudgeClient) -> "JudgeGrader":
    """Makes a grader of what a specification says.

    Raises:
        AgentFailed: If something there is out of its range.
    """
    if not target.model:
        raise AgentFailed("The judge has no model.")
    if not 1 <= len(target.dimensions) <= MAX_DIMENSIONS or len(set(target.dimensions)) < len(target.dimensions):
        raise AgentFailed(f"A judge scores 1 to {MAX_DIMENSIONS} different dimensions.")
    for dimension in target.dimensions:
        if not _DIMENSION.fullmatch(dimension):
            raise AgentFailed(f"The judge's dimension {dimension!r} is not 1 to 64 characters of [a-z0-9_.-].")
    bounds = target.min_score, target.max_score
    if not all(math.isfinite(bound) for bound in bounds) or not target.min_score < target.max_score:
        raise AgentFailed(f"The judge's max_score {bounds[1]:g} is not greater than its min_score {bounds[0]:g}.")
    if not 1 <= target.sample_count <= MAX_SAMPLES:
        raise AgentFailed(f"The judge's sample_count must lie in 1 to {MAX_SAMPLES}.")
    scale = Scale(dimensions=target.dimensions, min_score=target.min_score, max_score=target.max_score)
    return JudgeGrader(target=target, scale=scale, client=client)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeGrader:
    """A grader that asks a model."""

    target: JudgeTarget
    scale: Scale
    client: JudgeClient

    async def grade(self, invocation: Invocation, outcome: object) -> tuple[Reward, ...]:
        """Asks the judge as often as its specification says; notes its reasons with the attempt.

        Raises:
            AgentFailed: If it is refused, or answers no scores.
            HostUnavailable: If its backend fails.
        """
        if "OPENAI_BASE_URL" not in invocation.context.environment:
            raise HostUnavailable("This runner has no model proxy through which a judge could be asked.")
        enter_trace(invocation.context.environment["TRACEPARENT"])
        messages = self._messages(invocation, outcome)
        tasks = [
            asyncio.create_task(self._verdict(invocation, messages), name="judge")
            for _ in range(self.target.sample_count)
        ]
        try:
            verdicts = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for number, verdict in enumerate(verdicts):
            self._note(verdict, number)
        means = mean_rewards(verdicts, self.scale)
        return tuple(Reward(dimension=dimension, value=value) for dimension, value in means.items())

    def _messages(self, invocation: Invocation, outcome: object) -> list[_Message]:
        marker = secrets.token_hex(8)
        shown = fenced(encode_output(outcome).content.decode(errors="replace"), marker)
        task = fenced(invocation.assignment.input.decode(errors="replace"), marker)
        placeholders = placeholders_of(invocation, outcome=shown, task=task)
        prompt = expand({"judge.prompt": self.target.prompt or GENERAL_PROMPT}, placeholders)["judge.prompt"]
        if shown not in prompt:
            # A prompt that leaves it out would have every outcome judged alike.
            prompt = f"{prompt}\n\nThe outcome:\n{shown}"
        return [{"role": "system", "content": system_prompt(self.scale, marker)}, {"role": "user", "content": prompt}]

    async def _verdict(self, invocation: Invocation, asked: list[_Message]) -> Verdict:
        messages = list(asked)
        problem = ""
        for _ in range(MAX_ANSWERS):
            text = await self._answer(invocation, messages)
            try:
                return verdict_of(text, self.scale)
            except BadAnswer as error:
                problem = str(error)
                again = f"{problem} Answer again, with nothing but the JSON object."
                messages = [*asked, {"role": "assistant", "content": text}, {"role": "user", "content": again}]
        raise AgentFailed(
            f"The grader failed. The judge {self.target.model!r} gave no verdict in {MAX_ANSWERS} answers. {problem}"
        )

    async def _answer(self, invocation: Invocation, messages: list[_Message]) -> str:
        body: dict[str, Any] = {"model": self.target.model, "messages": messages}
        status, document = await self._asked(invocation, {**body, "response_format": response_format(self.scale)})
        if status == _BAD_REQUEST:
            # Not every backend has structured output; the prompt asks for the same.
            status, document = await self._asked(invocation, body)
        if status >= _BAD_REQUEST:
            raise AgentFailed(
                f"The grader failed. The judge {self.target.model!r} is refused: {status} {_error_text(document)}"
            )
        return _content(document)

    async def _asked(self, invocation: Invocation, body: dict[str, Any]) -> tuple[int, object]:
        """Returns the status and the answer, once it says something about the question."""
        import httpx2

        context = invocation.context
        headers = {"authorization": f"Bearer {context.api_key}", AGENT_HEADER: GRADER_AGENT}
        failure = ""
        for number in range(MAX_TRIES):
            if number:
                await asyncio.sleep(RETRY_PAUSE_S * number)
            try:
                with acting_as(GRADER_AGENT):
                    answer = await self.client.open().post(
                        f"{context.openai_base_url}/chat/completions",
                        json=body,
                        headers=headers,
                        timeout=max(1.0, context.remaining_s),
                    )
                document = answer.json()
            except (httpx2.TransportError, ValueError) as error:
                failure = type(error).__name__
                continue
            if answer.status_code < httpx2.codes.INTERNAL_SERVER_ERROR and answer.status_code not in _PASSING:
                return answer.status_code, document
            failure = f"{answer.status_code} {_error_text(document)}"
        raise HostUnavailable(f"The judge {self.target.model!r} cannot be asked: {failure}")

    def _note(self, verdict: Verdict, number: int) -> None:
        noted: dict[str, object] = {f"score.{dimension}": score for dimension, score in verdict.scores.items()}
        emit_annotation(
            {"judge.model": self.target.model, "judge.sample": number, "judge.reason": verdict.reason, **noted}
        )


def _content(document: object) -> str:
    try:
        text = document["choices"][0]["message"]["content"]  # type: ignore[index]  # Checked by the handler.
    except (TypeError, LookupError):
        return ""
    return text if isinstance(text, str) else ""


def _error_text(document: object) -> str:
    error = document.get("error") if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else json.dumps(document)[:500]
