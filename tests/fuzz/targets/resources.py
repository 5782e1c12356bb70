"""Contents of resources: checked by the store, and what passes is read by every service. A line names the kind."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import zstandard
from google.protobuf.message import Message

from fulmen.kinds import content_problems
from fulmen.llm_proxy.v1.backend_pb2 import Backend
from fulmen.llm_proxy.v1.route_pb2 import Route
from fulmen.runner.v1.agent_spec_pb2 import AgentSpec
from fulmen.train_toml.agent import agent_config
from fulmen_algorithm.rollouts.scored_groups import read_scored_groups
from fulmen_algorithm.runs.creation.inputs import read_demonstrations, read_preferences, read_tasks
from fulmen_llm_proxy.routing.resources import Document, build_table
from fulmen_llm_proxy.routing.table import RoutingTable
from fulmen_runner.agents.library import specification_of
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_store.resources.diff import compare
from tests.fuzz.mutation import decoded, mutate_bytes, mutate_json, mutate_message
from tests.fuzz.target import PureTarget, check_text

_MESSAGES: dict[str, type[Message]] = {"route": Route, "backend": Backend, "agent": AgentSpec}


def _read_agent(content: bytes) -> None:
    spec = AgentSpec.FromString(content)
    with contextlib.suppress(AgentFailed):
        specification_of(spec, "resources/agent/versions/1")
    agent_config(spec)


def _read_table(kind: str) -> Callable[[bytes], None]:
    def read(content: bytes) -> None:
        documents = {f"{kind}.x": Document(kind=kind, version=1, content=content, size_bytes=len(content))}
        table = build_table(documents, before=RoutingTable())
        assert not table.unreadable, "the store accepts what the proxy cannot read"

    return read


def _read_lines(content: bytes) -> None:
    for read in (read_tasks, read_demonstrations, read_preferences):
        _, violations = read(content, field="inputs.train")
        for each in violations:
            check_text(each.description)


def _read_scores(content: bytes) -> None:
    for packed in (content, zstandard.compress(content)):
        _, violations = read_scored_groups(packed, field="inputs.scores")
        for each in violations:
            check_text(each.description)


_READERS: dict[str, Callable[[bytes], Any]] = {
    "route": _read_table("route"),
    "backend": _read_table("backend"),
    "agent": _read_agent,
    "policy": lambda content: json.loads(content)["path"],
    "prompt": lambda content: content.decode(),
    "dataset": _read_lines,
    "scores": _read_scores,
}


def run(data: bytes) -> None:
    """Checks a content as the store does, and reads what it would accept."""
    head, _, content = data.partition(b"\n")
    kind = head.decode("latin-1")
    violations = content_problems(kind, content)
    for each in violations:
        check_text(f"{each.field} {each.description}")
    compare(content, content[:-1] + b"x", base_name="a", target_name="b", is_json=True)
    if not violations:
        _READERS.get(kind, len)(content)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Changes a message by its fields, anything else by its lines of JSON."""
    head, _, content = data.partition(b"\n")
    message_class = _MESSAGES.get(head.decode("latin-1"))
    if rng.random() < 0.15:
        return head + b"\n" + mutate_bytes(content, rng)
    if message_class is not None:
        message = decoded(message_class, content)
        mutate_message(
            message, rng, ("backends/b", "routes/m", "http://h/v1", "a.py:b", "train", "resources/b/versions/1")
        )
        return head + b"\n" + message.SerializeToString()
    lines = content.split(b"\n")
    place = rng.randrange(len(lines))
    lines[place] = mutate_json(lines[place], rng)
    return head + b"\n" + b"\n".join(lines)


def _seeds() -> list[bytes]:
    route = Route(name="routes/m", fallbacks=["routes/n"])
    route.targets.add(backend="backends/b", backend_model="m", weight=1, policy="p", policy_version=3)
    route.overrides.add(mode="train", request_fields_json='{"temperature": 1}')
    route.deadline.seconds = route.hedge_delay.nanos = 5
    backend = Backend(name="backends/b", base_url="http://h:1/v1", key_name="k", max_in_flight=5, apis=[1])
    backend.hold_until_time.seconds = 10**9
    python, judged = AgentSpec(bundle="resources/b/versions/1"), AgentSpec()
    python.python.target = "a.py:b"
    python.limits.memory_bytes = 10**9
    python.environment["A"] = "${secrets.x}"
    judged.command.argv.extend(["a", "b"])
    judged.grader.judge.model, judged.grader.judge.max_score = "m", 10
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rollout = "projects/default/rollouts/0190a0b0-1234-7000-8000-00000000abcd"
    scores = [
        {
            "format": "fulmen.scores/1", "grader": {"kind": "python", "entry": "a", "bundle_sha256": ""},
            "source": {"training_run": "", "filter": "", "states": []}, "counts": {"rollouts": 1, "failed": 0},
        },
        {"rollout": rollout, "attempt": f"{rollout}/attempts/1", "mode": "train", "group": "g", "rewards": [{"dimension": "reward", "value": 1}]},
    ]  # fmt: skip
    return [
        b"route\n" + route.SerializeToString(),
        b"backend\n" + backend.SerializeToString(),
        b"agent\n" + python.SerializeToString(),
        b"agent\n" + judged.SerializeToString(),
        b'policy\n{"path": "/x", "kind": "delta", "step": 1}',
        b"prompt\nAnswer {question}.",
        b"dataset\n" + json.dumps({"messages": turns, "tools": [{}]}).encode() + b'\n{"a": 1}',
        b"scores\n" + b"\n".join(json.dumps(line).encode() for line in scores),
    ]


TARGET = PureTarget(run=run, seeds=_seeds(), mutate=mutate)
