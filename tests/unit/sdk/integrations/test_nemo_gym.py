"""Episodes at a NeMo Gym server: a model reaches the tools that it was offered and nothing else of the server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fulmen.agent import Context
from fulmen.integrations import nemo_gym
from fulmen.integrations.environments import EnvironmentInvalid

ROW = {"responses_create_params": {"input": "hi", "tools": [{"type": "function", "name": "add"}]}}


class Server(ThreadingHTTPServer):
    """A resources server, and the model that calls tools of these names at it.

    Attributes:
        asked: Paths of all requests.
        answers: Bodies by path, in place of the usual ones.
        calls: Names and arguments of the calls of the model's first answer.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.answers: dict[str, bytes] = {}
        self.calls: list[tuple[str, str]] = []
        self.seen: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(self.server.answers.get(self.path, b'{"paths": {"/seed_session": {}, "/verify": {}, "/add": {}}}'))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(self.path)
        usual: Any = {"/verify": {"reward": 0.5}}.get(self.path, {})
        if self.path == "/responses":
            usual, self.server.calls = {"output": self._turn()}, []
            self.server.seen = body["input"]
        self._answer(self.server.answers.get(self.path, json.dumps(usual).encode()))

    def _turn(self) -> list[Any]:
        calls = [
            {"type": "function_call", "name": name, "call_id": "c", "arguments": arguments}
            for name, arguments in self.server.calls
        ]
        return calls or [{"type": "message"}]

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def played(server: Server) -> float:
    [task] = nemo_gym.convert(server.url, [ROW], model="m").tasks
    environment = {"OPENAI_BASE_URL": server.url, "OPENAI_API_KEY": "key"}
    return nemo_gym.play(
        task,
        Context(
            rollout="r",
            attempt="a",
            attempt_number=1,
            mode="train",
            deadline=time.monotonic() + 30,
            environment=environment,
        ),
    )


def test_a_model_calls_what_it_was_offered_and_no_other_path(server: Server) -> None:
    names = ["verify", "seed_session", "../verify", "add?x=1", "a b", "\r\n", ""]
    server.calls = [*((name, "{}") for name in names), ("add", '{"a": 1}'), ("add", "[" * 100_000)]
    assert played(server) == 0.5
    assert server.asked == ["/seed_session", "/responses", "/add", "/responses", "/verify"]
    told = [each["output"] for each in server.seen if each.get("type") == "function_call_output"]
    assert [("no such tool" in each) for each in told] == [*(True for _ in names), False, False]


@pytest.mark.parametrize("body", [b"[]", b"<html>", b"[" * 100_000, b"\xff", b"1" * 17_000_000])
def test_an_answer_that_is_none_is_told_with_its_address(server: Server, body: bytes) -> None:
    server.answers["/verify"] = body
    with pytest.raises(nemo_gym.ServerFailed, match=r"/verify (answered|did not answer) with") as failed:
        played(server)
    assert len(str(failed.value)) < 400


@pytest.mark.parametrize("body", [b"[]", b"{}", b"[" * 100_000, b"<html>"])
def test_a_server_of_another_kind_and_counts_below_one_are_refused_at_once(server: Server, body: bytes) -> None:
    server.answers["/openapi.json"] = body
    with pytest.raises(EnvironmentInvalid) as refused:
        nemo_gym.convert(server.url, [ROW], model="", count=-1, max_steps=0)
    told = "\n".join(refused.value.problems)
    for problem in ("model: ", "count: must be at least 1, not -1", "max_steps: must be", "the server does not answer"):
        assert problem in told
