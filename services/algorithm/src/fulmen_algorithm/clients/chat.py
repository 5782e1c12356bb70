"""Chat models for algorithms: through the LLM proxy over gRPC, or another endpoint over HTTP.

Invariant: a call with an answer is never repeated; a failed call without an answer is retried, for a limited time.
"""

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from fulmen.errors import FulmenError
from fulmen.llm_proxy.v1 import completion_service_pb2 as pb
from fulmen.llm_proxy.v1.completion_service_pb2_grpc import CompletionServiceStub
from fulmen.rpc.channel import FulmenChannel
from fulmen_algorithm.clients.patience import AWAY, Notify
from fulmen_algorithm.runs.failure import RunFailed
from fulmen_algorithm.runs.ports import ChatAnswer, ChatRequest
from fulmen_algorithm.runs.run import sendable

PATH = "/v1/chat/completions"
SCORING_PATH = "/v1/completions"
TEACHER = "teacher"
"""Agent name of the calls that score tokens."""
PROXY = "LLM proxy"
CALL_DEADLINE_S = 600.0
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
"""Answers that do not depend on the question: limits and server errors."""
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""Errors that an answer of another form leads to; infinite counts lead to the last one."""
SHOWN_CHARS = 300
NOT_FOUND = 404
ROUTE_HINT = " `fulmen proxy route put` gives it a route (docs/routing.md)."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reply:
    """An HTTP answer of either path; status 0 without one."""

    status: int
    body: bytes = b""
    retry_after_s: float = 0.0


class ChatClient:
    """See `runs.ports.ChatModels`."""

    def __init__(
        self,
        proxy: FulmenChannel,
        *,
        project: str,
        endpoints: Mapping[str, str],
        outage_limit_s: float,
        notify: Notify,
    ) -> None:
        """Initializes the client.

        Args:
            proxy: The LLM proxy.
            project: Project whose models are called, within its limits.
            endpoints: API keys of the allowed endpoints by address; empty for none.
            outage_limit_s: Maximum time for which a call is retried, in seconds.
            notify: Receives notices about waits.
        """
        self._stub = CompletionServiceStub(proxy)
        self._project = project
        self._endpoints = endpoints
        self._outage_limit_s = outage_limit_s
        self._notify = notify

    async def ask(self, request: ChatRequest) -> ChatAnswer:
        """Asks once; see `ChatModels.ask`."""
        if request.base_url and request.base_url not in self._endpoints:
            raise RunFailed(f"{request.base_url} is not in the service's setting chat_endpoints.")
        if request.base_url:
            return _answer(await self._answered(lambda: self._over_http(request), request.model, request.base_url))
        return _answer(
            await self._answered(
                lambda: self._over_proxy(PATH, _body(request), purpose=request.purpose), request.model, PROXY
            )
        )

    async def score(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """Scores tokens; see `ChatModels.score`."""
        fields = {"model": model, "prompt": list(token_ids), "max_tokens": 1, "prompt_logprobs": 0}
        body = json.dumps(fields).encode()
        answer = await self._answered(lambda: self._over_proxy(SCORING_PATH, body, purpose=TEACHER), model, PROXY)
        return _scores(answer, token_ids, model)

    async def _answered(self, call: Callable[[], Awaitable[_Reply]], model: str, who: str) -> bytes:
        """Calls until there is an answer; returns its body.

        Args:
            call: Calls once.
            model: The model that is called.
            who: Who calls it.
        """
        ends, wait_s = time.monotonic() + self._outage_limit_s, FIRST_WAIT_S
        while True:
            reply = await call()
            if reply.status == 200:
                return reply.body
            problem = f"{model} at {who}: {_problem(reply)}"
            if reply.status not in PASSING and reply.status:
                unknown = who == PROXY and reply.status == NOT_FOUND
                raise RunFailed(f"The question was refused by {problem}{ROUTE_HINT if unknown else ''}")
            pause_s = max(wait_s, reply.retry_after_s)
            if time.monotonic() + pause_s > ends:
                raise RunFailed(f"No answer from {problem}")
            if wait_s == FIRST_WAIT_S:
                self._notify("warning", f"No answer from {problem} The run asks again.")
            await asyncio.sleep(pause_s)
            wait_s = min(wait_s * 2, LONGEST_WAIT_S)

    async def _over_proxy(self, path: str, body: bytes, *, purpose: str) -> _Reply:
        message = pb.CompleteRequest(path=path, body_json=body, agent_name=purpose, project=self._project)
        try:
            answer = await self._stub.Complete(message, timeout=CALL_DEADLINE_S)
        except AWAY:
            return _Reply(status=0)
        except FulmenError as error:
            raise RunFailed(f"The LLM proxy refused the question: {error.message}") from error
        return _Reply(status=answer.http_status, body=answer.body_json, retry_after_s=answer.retry_after_seconds)

    async def _over_http(self, request: ChatRequest) -> _Reply:
        headers = {"Content-Type": "application/json"}
        if key := self._endpoints[request.base_url]:
            headers["Authorization"] = f"Bearer {key}"
        url = f"{request.base_url}/{PATH.removeprefix('/v1/')}"
        timeout = aiohttp.ClientTimeout(total=CALL_DEADLINE_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                # Following a redirect would send the key to an unconfigured address.
                session.post(url, data=_body(request), allow_redirects=False) as response,
            ):
                after = response.headers.get("Retry-After", "")
                body = await response.read()
                return _Reply(
                    status=response.status, body=body, retry_after_s=float(after) if after.isdecimal() else 0.0
                )
        except (aiohttp.ClientError, TimeoutError):
            return _Reply(status=0)


def _body(request: ChatRequest) -> bytes:
    fields: dict[str, Any] = {
        "model": request.model,
        "messages": [dict(message) for message in request.messages],
        "max_tokens": request.max_tokens,
    }
    if request.temperature is not None:
        fields["temperature"] = request.temperature
    return json.dumps(fields).encode()


def _answer(body: bytes) -> ChatAnswer:
    """Reads an answer.

    Raises:
        RunFailed: if it is none of a chat model's.
    """
    try:
        document = json.loads(body)
        text = document["choices"][0]["message"].get("content") or ""
        usage = document.get("usage") or {}
        return ChatAnswer(
            text=sendable(str(text)),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens") or 0),
        )
    except UNREADABLE as error:
        raise RunFailed("The answer is not a chat completion.") from error


def _scores(body: bytes, token_ids: Sequence[int], model: str) -> list[float]:
    """Reads the log-probabilities of tokens in the form of vLLM.

    Raises:
        RunFailed: if there are none, or not of these tokens.
    """
    try:
        listed = json.loads(body)["choices"][0]["prompt_logprobs"]
        pairs = zip(token_ids[1:], listed[1:], strict=True)
        found = [0.0, *(float(each[str(token)]["logprob"]) for token, each in pairs)]
    except UNREADABLE as error:
        raise RunFailed(
            f"{model} gave no log-probabilities of the tokens (prompt_logprobs). A teacher needs a route to vLLM or an"
            " embedded engine, and the tokenizer of the policy (docs/distillation.md)."
        ) from error
    if not all(map(math.isfinite, found)):
        raise RunFailed(f"{model} gave log-probabilities that are not finite.")
    return found


def _problem(reply: _Reply) -> str:
    """Returns the error message of the endpoint, or a description of the failure."""
    if not reply.status:
        return "it does not answer."
    try:
        error = json.loads(reply.body).get("error")
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError, RecursionError):
        text = ""
    said = str(text or "")[:SHOWN_CHARS].rstrip(".")
    return f"status {reply.status}{f', {said}' if said else ''}."
