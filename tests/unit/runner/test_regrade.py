"""Graders score stored outcomes as they would have scored those of a running agent."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from fulmen.ids import DEFAULT_PROJECT, attempt_name, uuid7
from fulmen.runner.v1 import agent_spec_pb2 as pb
from fulmen_runner.attempts.program import encode_output
from fulmen_runner.regrade import AgentFailed, Bench, Stored, open_regrader
from tests.support.runner.harness import bundle_of

GRADERS = """\
import asyncio
import fulmen
from pathlib import Path


def place(task, outcome):
    return task["known"].index(repr(outcome))


async def emits(task, outcome):
    fulmen.emit_reward(0.5, dimension="emitted", step=2)
    return {"read": float(Path(__file__).with_name("data.txt").read_text())}


async def sleeps(task, outcome):
    await asyncio.Event().wait()


def quiet(task, outcome):
    return None


def with_record(task, outcome, context):
    return context.stored
"""
VALUES: list[Any] = [None, "", "text", "42", 42, {"a": [1, None]}, [], True, 0.5]


@pytest.fixture(autouse=True)
def same_environment() -> Iterator[None]:
    """Takes back what a runner's process puts into its environment."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def bench(**changes: Any) -> Bench:
    """Packs the graders."""
    packed = bundle_of({"graders.py": GRADERS, "data.txt": "7.5"})
    return Bench(archive=packed, archive_sha256_hex=hashlib.sha256(packed).hexdigest(), **changes)


def python(name: str) -> pb.Grader:
    """Names a grader."""
    return pb.Grader(python=pb.PythonEntry(target=f"graders.py:{name}"))


def stored(value: object, task: bytes = b"{}", *, record: object = None) -> Stored:
    """Stores an outcome as a runner does."""
    output = encode_output(value)
    return Stored(
        attempt=attempt_name(DEFAULT_PROJECT, uuid7(), 1),
        mode="train",
        input=task,
        input_content_type="",
        content=output.content,
        content_type=output.content_type,
        record=record,
    )


async def test_the_outcome_is_the_value_that_the_agent_returned() -> None:

    task = json.dumps({"known": [repr(value) for value in VALUES]}).encode()
    async with open_regrader(python("place"), bench()) as regrader:
        assert not regrader.takes_context
        found = [await regrader.grade(stored(value, task)) for value in VALUES]

    assert [each["failure"] for each in found] == [None] * len(VALUES)
    assert [each["rewards"][0]["value"] for each in found] == list(range(len(VALUES)))


async def test_what_a_grader_emits_counts_and_it_finds_its_files() -> None:
    async with open_regrader(python("emits"), bench()) as regrader:
        found = await regrader.grade(stored("x"))

    assert {(each["dimension"], each["step"], each["value"]) for each in found["rewards"]} == {
        ("emitted", 2, 0.5),
        ("read", None, 7.5),
    }


async def test_the_record_is_in_the_context_of_a_grader_that_takes_one() -> None:
    async with open_regrader(python("with_record"), bench()) as regrader:
        assert regrader.takes_context
        found = await regrader.grade(stored("x", record=12.0))

    assert [each["value"] for each in found["rewards"]] == [12.0]


@pytest.mark.parametrize(
    ("grader", "kind", "text"),
    [
        ("sleeps", "TIMEOUT", "while the grader was running"),
        ("quiet", "REWARD_MISSING", "no reward"),
        ("place", "AGENT_ERROR", "KeyError"),
    ],
)
async def test_failures_are_those_of_a_runner(grader: str, kind: str, text: str) -> None:
    async with open_regrader(python(grader), bench(timeout_s=0.2 if kind == "TIMEOUT" else 60.0)) as regrader:
        found = await regrader.grade(stored("x"))

    assert found["failure"]["kind"] == kind
    assert text in found["failure"]["message"]
    assert found["rewards"] == []


class _Model(BaseHTTPRequestHandler):
    """Answers every question with a score of 7, to those who have the key."""

    def do_POST(self) -> None:  # The base class's name.
        """Answers."""
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        good = self.headers["Authorization"] == "Bearer the caller's token" and b"12+34=46" in asked
        text = json.dumps({"reason": "well", "scores": {"reward": 7}})
        answer = json.dumps({"choices": [{"message": {"content": text if good else "none"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # The base class's name.
        """Writes nothing."""


async def test_a_judge_is_asked_with_the_callers_key() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        judge = pb.Grader(judge=pb.JudgeEntry(model="m"))
        async with open_regrader(judge, Bench(llm_proxy_url=url, key="the caller's token")) as regrader:
            found = await regrader.grade(stored("12+34=46"))
    finally:
        server.shutdown()
        server.server_close()

    assert found["failure"] is None, found
    assert [(each["dimension"], each["value"]) for each in found["rewards"]] == [("reward", 0.7)]


async def test_a_judge_without_a_model_proxy_is_infrastructure() -> None:
    async with open_regrader(pb.Grader(judge=pb.JudgeEntry(model="m")), Bench()) as regrader:
        found = await regrader.grade(stored("x"))

    assert found["failure"]["kind"] == "INFRA"


async def test_a_grader_that_cannot_be_loaded_is_an_error_on_opening() -> None:
    with pytest.raises(AgentFailed, match="no callable 'missing'"):
        async with open_regrader(python("missing"), bench()):
            pass
    with pytest.raises(AgentFailed, match="no grader"):
        async with open_regrader(pb.Grader(), bench()):
            pass
