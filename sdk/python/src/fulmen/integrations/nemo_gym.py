"""NeMo Gym's resources servers as agents with tasks: an episode for each line of their data set.

An attempt does what NeMo Gym's simple agent does: it seeds a session, calls the model with the Responses API, calls the requested tools at
the server, and lets the server verify the episode. The server provides the reward. NeMo Gym itself is not needed where agents run.

Source: `responses_api_agents/simple_agent/app.py` and `nemo_gym/base_resources_server.py` of nemo-gym 0.4.
"""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from http.cookiejar import CookieJar
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fulmen.agent import Context
from fulmen.integrations.environments import TASK, Environment, EnvironmentInvalid, agent_config, below_one, wrapped

if TYPE_CHECKING:
    from fulmen.train_toml.agent import AgentConfig

__all__ = ["ServerFailed", "convert", "play"]

TARGET = "fulmen.integrations.nemo_gym:play"
CONNECT_S = 10.0
MAX_ANSWER_BYTES = 16 * 2**20
PARAMETERS = "responses_create_params"


class ServerFailed(RuntimeError):
    """The resources server or the proxy refused a request; with its message."""


def convert(
    url: str,
    rows: str | PathLike[str] | Iterable[Mapping[str, Any]],
    *,
    model: str,
    count: int | None = None,
    max_steps: int = 16,
    agent: AgentConfig | None = None,
) -> Environment:
    """Returns a resources server as an agent with a task for each row of a data set.

    Args:
        url: Address of the resources server, as agents reach it: `http://host:port`.
        rows: The data set: a file of JSON lines, or rows with `responses_create_params` and what `verify` reads.
        model: Name of the model that acts.
        count: Number of rows to use, starting with the first; None for all.
        max_steps: Maximum number of model calls; the episode is then verified in its current state.
        agent: Further settings of the agent.

    Raises:
        EnvironmentInvalid: With every problem: a server that does not answer, a row without an input, a tool that it does not have.
        OSError: If the file cannot be read.
    """
    taken, problems = _rows(rows)[:count], [] if model else ["model: it has no name"]
    problems += below_one(count=count, max_steps=max_steps)
    problems += [] if taken else ["rows: the list is empty"]
    try:
        paths = _paths(url)
        problems += [f"the server has no {path}" for path in ("/seed_session", "/verify") if path not in paths]
    except (OSError, ValueError, KeyError, TypeError, RecursionError, http.client.HTTPException) as error:
        paths = None
        problems.append(f"the server does not answer at {url}/openapi.json: {type(error).__name__}: {error}")
    for number, row in enumerate(taken, start=1):
        problems += [f"row {number}: {problem}" for problem in _row_problems(row, paths)]
    if problems:
        raise EnvironmentInvalid(f"The NeMo Gym server {url}", problems)
    description = {"url": url.rstrip("/"), "model": model, "max_steps": max_steps}
    tasks = tuple(wrapped({**description, "row": dict(row)}, number=number) for number, row in enumerate(taken))
    return Environment(agent=agent_config(TARGET, agent), tasks=tasks, model=model)


def _rows(rows: str | PathLike[str] | Iterable[Mapping[str, Any]]) -> list[Any]:
    if not isinstance(rows, str | PathLike):
        return list(rows)
    lines = Path(rows).read_text(encoding="utf-8").splitlines()
    found = []
    for line in filter(str.strip, lines):
        try:
            found.append(json.loads(line))
        except ValueError:
            found.append(line)
    return found


def _paths(url: str) -> frozenset[str]:
    if not url.startswith(("http://", "https://")):
        raise ValueError("the address must begin with http:// or https://")
    with urllib.request.urlopen(f"{url.rstrip('/')}/openapi.json", timeout=CONNECT_S) as answer:  # noqa: S310  # checked above
        return frozenset(json.load(answer)["paths"])


def _row_problems(row: Any, paths: frozenset[str] | None) -> Iterable[str]:
    parameters = row.get(PARAMETERS) if isinstance(row, Mapping) else None
    if not isinstance(parameters, Mapping) or not parameters.get("input"):
        yield f"it has no {PARAMETERS} with an input"
        return
    try:
        json.dumps(row)
    except (TypeError, ValueError) as error:
        yield str(error)
    for name in _tools(parameters):
        if paths is not None and f"/{name}" not in paths and "/{path}" not in paths:
            yield f"the server has no tool {name!r}"


def _tools(parameters: Mapping[str, Any]) -> list[Any]:
    """Returns the names of a row's tools."""
    return [tool.get("name") if isinstance(tool, Mapping) else None for tool in parameters.get("tools") or ()]


def play(task: Mapping[str, Any], context: Context) -> float:
    """Runs an episode; returns the server's reward. The agent that runners call.

    Raises:
        ServerFailed: If the server or the proxy refuses a request.
    """
    told = task[TASK]
    row, url = told["row"], told["url"]
    session = _Session(context)
    session.asked(f"{url}/seed_session", row)
    parameters = {**row[PARAMETERS], "model": told["model"]}
    given = parameters["input"]
    begin = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
    outputs: list[dict[str, Any]] = []
    for _ in range(told["max_steps"]):
        answer = session.model({**parameters, "input": [*begin, *outputs]})
        outputs += answer["output"]
        calls = [each for each in answer["output"] if each["type"] == "function_call"]
        said = any(each["type"] == "message" for each in answer["output"])
        if answer.get("incomplete_details") or (said and not calls):
            break
        outputs += [session.tool(url, call, offered=_tools(parameters)) for call in calls]
    verified = session.asked(f"{url}/verify", {**row, "response": {**answer, "output": outputs}})
    return float(verified["reward"])


class _Session:
    """Requests of an episode. The server identifies it by cookies, which are not sent to the proxy."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))

    def asked(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Posts to the server; returns its answer."""
        status, text = self._post(url, body)
        return _read(url, status, text)

    def tool(self, url: str, call: Mapping[str, Any], *, offered: Sequence[Any]) -> dict[str, Any]:
        """Calls a tool that the model was offered; its answer is passed to the model, whatever its status.

        Other names are refused: a model may name `verify`, or a path of another service.
        """
        try:
            if call["name"] not in offered:
                raise ValueError("no such tool")
            arguments = json.loads(call["arguments"])
            if not isinstance(arguments, dict):
                raise TypeError("the arguments are not a JSON object")
            _, text = self._post(f"{url}/{call['name']}", arguments)
        except (TypeError, ValueError, RecursionError) as error:
            text = json.dumps({"error": f"Invalid tool call arguments: {error!r}"})
        return {"type": "function_call_output", "call_id": call["call_id"], "output": text}

    def model(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Calls the model."""
        url = f"{self._context.openai_base_url}/responses"
        headers = {"Authorization": f"Bearer {self._context.api_key}"}
        return _read(url, *_sent(urllib.request.build_opener(), url, body, headers, self._context.remaining_s))

    def _post(self, url: str, body: Mapping[str, Any]) -> tuple[int, str]:
        return _sent(self._opener, url, body, {}, self._context.remaining_s)


def _sent(
    opener: urllib.request.OpenerDirector, url: str, body: Mapping[str, Any], headers: Mapping[str, str], limit_s: float
) -> tuple[int, str]:
    """Posts JSON; returns the status and the text of the answer.

    Raises:
        ServerFailed: If there is no answer.
    """
    every = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, data=json.dumps(body).encode(), headers=every)  # noqa: S310  # checked by convert
    try:
        with opener.open(request, timeout=max(1.0, limit_s)) as answer:
            return answer.status, _text(url, answer.read(MAX_ANSWER_BYTES + 1))
    except urllib.error.HTTPError as error:
        return error.code, _text(url, error.read(MAX_ANSWER_BYTES + 1))
    except (OSError, http.client.HTTPException) as error:
        raise ServerFailed(f"{url}: {type(error).__name__}: {error}") from None


def _text(url: str, body: bytes) -> str:
    if len(body) > MAX_ANSWER_BYTES:
        raise ServerFailed(f"{url} answered with more than {MAX_ANSWER_BYTES} bytes.")
    return body.decode(errors="replace")


def _read(url: str, status: int, text: str) -> dict[str, Any]:
    if status >= 400:
        raise ServerFailed(f"{url} answered with status {status}: {text[:2000]}")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ServerFailed(f"{url} did not answer with a JSON object: {text[:200]}")
    return found
