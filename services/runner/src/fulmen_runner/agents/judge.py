"""Graders that are language models, called through the model proxy with the attempt's key; see `judging`.

Invariant: a failing backend is INFRA. A judge whose request is rejected, or whose answers contain no valid scores, is
AGENT_ERROR: its specification is at fault.
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
"""Number of answers requested for one verdict."""

MAX_TRIES = 3
"""Number of tries of one request while the backend fails, besides the proxy's own retries."""

RETRY_PAUSE_S = 0.5
MAX_DIMENSIONS = 16
MAX_SAMPLES = 9

_DIMENSION = re.compile(r"[a-z0-9_.-]{1,64}")
_BAD_REQUEST = 400
_TRANSIENT = frozenset({401, 403, 408, 409, 425, 429})
"""Rejections that are not due to the request's content: of the attempt's key, or by a limit."""

_Message = dict[str, str]


class JudgeClient:
    """HTTP client shared by all judges of a runner, created on first use."""

    def __init__(self) -> None:
        self._client: httpx2.AsyncClient | None = None

    def open(self) -> "httpx2.AsyncClient":
        """Returns the client."""
        if self._client is None:
            # Deferred: not needed by runners without judges.
            import httpx2

            self._client = httpx2.AsyncClient(limits=httpx2.Limits(max_connections=None), trust_env=False)
        return self._client

    async def close(self) -> None:
        """Closes the connections."""
        if self._client is not None:
            await self._client.aclose()


def judge(target: JudgeTarget, client: JudgeClient) -> "JudgeGrader":
    """Creates a grader from its specification.

    Raises:
        AgentFailed: If a value is out of range.
    """
    if not target.model:
        raise AgentFailed("judge has no model")
    if not 1 <= len(target.dimensions) <= MAX_DIMENSIONS or len(set(target.dimensions)) < len(target.dimensions):
        raise AgentFailed(f"judge must score 1 to {MAX_DIMENSIONS} different dimensions")
    for dimension in target.dimensions:
        if not _DIMENSION.fullmatch(dimension):
            raise AgentFailed(f"dimension {dimension!r} of the judge must be 1 to 64 characters of [a-z0-9_.-]")
    bounds = target.min_score, target.max_score
    if not all(math.isfinite(bound) for bound in bounds) or not target.min_score < target.max_score:
        raise AgentFailed(f"max_score {bounds[1]:g} of the judge must be greater than its min_score {bounds[0]:g}")
    if not 1 <= target.sample_count <= MAX_SAMPLES:
        raise AgentFailed(f"sample_count of the judge must be between 1 and {MAX_SAMPLES}")
    scale = Scale(dimensions=target.dimensions, min_score=target.min_score, max_score=target.max_score)
    return JudgeGrader(target=target, scale=scale, client=client)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeGrader:
    """A grader that asks a model."""

    target: JudgeTarget
    scale: Scale
    client: JudgeClient

    async def grade(self, invocation: Invocation, outcome: object) -> tuple[Reward, ...]:
        """Returns the mean of `sample_count` verdicts; records their reasons as annotations of the attempt.

        Raises:
            AgentFailed: If the request is rejected or an answer has no valid scores.
            HostUnavailable: If the backend fails.
        """
        if "OPENAI_BASE_URL" not in invocation.context.environment:
            raise HostUnavailable("runner has no model proxy to call the judge through")
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
            self._annotate(verdict, number)
        means = mean_rewards(verdicts, self.scale)
        return tuple(Reward(dimension=dimension, value=value) for dimension, value in means.items())

    def _messages(self, invocation: Invocation, outcome: object) -> list[_Message]:
        marker = secrets.token_hex(8)
        shown = fenced(encode_output(outcome).content.decode(errors="replace"), marker)
        task = fenced(invocation.assignment.input.decode(errors="replace"), marker)
        placeholders = placeholders_of(invocation, outcome=shown, task=task)
        prompt = expand({"judge.prompt": self.target.prompt or GENERAL_PROMPT}, placeholders)["judge.prompt"]
        if shown not in prompt:
            # Without the outcome in the prompt, every outcome would be judged alike.
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
            f"grader failed: judge {self.target.model!r} gave no valid verdict in {MAX_ANSWERS} answers: {problem}"
        )

    async def _answer(self, invocation: Invocation, messages: list[_Message]) -> str:
        body: dict[str, Any] = {"model": self.target.model, "messages": messages}
        status, document = await self._post(invocation, {**body, "response_format": response_format(self.scale)})
        if status == _BAD_REQUEST:
            # Not every backend supports structured output; the prompt asks for the same format.
            status, document = await self._post(invocation, body)
        if status >= _BAD_REQUEST:
            raise AgentFailed(
                f"grader failed: request to judge {self.target.model!r} was rejected: {status} {_error_text(document)}"
            )
        return _content(document)

    async def _post(self, invocation: Invocation, body: dict[str, Any]) -> tuple[int, object]:
        """Posts a request, with retries; returns the status and the body of the response."""
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
            if answer.status_code < httpx2.codes.INTERNAL_SERVER_ERROR and answer.status_code not in _TRANSIENT:
                return answer.status_code, document
            failure = f"{answer.status_code} {_error_text(document)}"
        raise HostUnavailable(f"judge {self.target.model!r} is unavailable: {failure}")

    def _annotate(self, verdict: Verdict, number: int) -> None:
        scores: dict[str, object] = {f"score.{dimension}": score for dimension, score in verdict.scores.items()}
        emit_annotation(
            {"judge.model": self.target.model, "judge.sample": number, "judge.reason": verdict.reason, **scores}
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
