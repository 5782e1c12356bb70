"""The programs of examples/frameworks in a real runner of their framework's environment, with a real store and proxy, and
what was captured of them: a tree of spans for each attempt."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from fulmen.ids import trace_id_of
from fulmen.store.v1 import resource_pb2, resource_service_pb2, rollout_pb2, rollout_service_pb2, span_service_pb2
from fulmen.type.v1.model_call_pb2 import ModelCallRecord
from fulmen_service_kit.security.tokens import Role
from tests.support.frameworks.model import multiply
from tests.support.frameworks.world import ENVIRONMENTS, PROGRAM_S, QUIET, ROOT, Outside
from tests.support.llm_proxy.backend import Backend, Script
from tests.support.llm_proxy.harness import MODEL, RunningProxy, running_proxy, target
from tests.support.postgres import shared_server
from tests.support.runner.harness import RunnerProcess, bundle_of, rollouts_of, spec_of
from tests.support.store.running import SIGNING_KEY, StoreHandle, Stubs, running_store

EXAMPLES = ROOT / "examples" / "frameworks"
FAILED = " !"
OWN_PYTHON = ""
"""Stands for the environment of Fulmen itself, instead of a framework's."""

_RANDOM_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, kw_only=True)
class Node:
    """A span with those that name it as their parent, in the order in which they began."""

    span: Span
    record: ModelCallRecord | None
    attributes: dict[str, Any]
    children: list[Node] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """`CALL` for a model call at the proxy, else OpenInference's kind of span; empty if it has none."""
        return "CALL" if self.record is not None else str(self.attributes.get("openinference.span.kind", ""))

    @property
    def failed(self) -> bool:
        """True if its status says so."""
        return self.span.status.code == Status.STATUS_CODE_ERROR

    def walk(self) -> Iterator[Node]:
        """Yields it and all below it, parents first."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A rollout that ended, and what was captured of its only attempt."""

    name: str
    rollout: rollout_pb2.Rollout
    roots: list[Node]

    @property
    def attempt(self) -> Any:
        """Its only attempt."""
        [attempt] = self.rollout.attempts
        return attempt

    @property
    def outcome(self) -> str:
        """What the agent returned or printed."""
        return str(self.attempt.output.decode()).strip().strip('"')

    def nodes(self, kind: str) -> list[Node]:
        """Returns its spans of a kind, in the order in which they began."""
        found = [node for root in self.roots for node in root.walk() if node.kind == kind]
        return sorted(found, key=lambda node: node.span.start_time_unix_nano)

    def outline(self) -> str:
        """Returns its tree as text: a line for each span, with its kind and name; `!` marks failures."""
        return "\n".join(_lines(self.roots, 0))


def _lines(nodes: list[Node], depth: int) -> Iterator[str]:
    # Several tools may run at once: which of them began first is chance.
    for together, alike in itertools.groupby(nodes, key=_is_tool):
        told = [_line(node, depth) + list(_lines(node.children, depth + 1)) for node in alike]
        for lines in sorted(told) if together else told:
            yield from lines


def _is_tool(node: Node) -> bool:
    return node.kind == "TOOL" or (bool(node.children) and all(map(_is_tool, node.children)))


def _line(node: Node, depth: int) -> list[str]:
    name = _RANDOM_ID.sub("ID", f"{node.kind} {node.span.name}".strip())
    return [f"{'  ' * depth}{name}{FAILED if node.failed else ''}"]


@dataclass(kw_only=True)
class Stage:
    """A store, a model and a proxy for the runners of tests."""

    store: StoreHandle
    stubs: Stubs
    proxy: RunningProxy
    backend: Backend
    outside: Outside

    @asynccontextmanager
    async def runner(self, environment: str, **settings: object) -> AsyncIterator[RunnerProcess]:
        """Runs a runner with the Python of a framework's environment."""
        folder = ENVIRONMENTS / environment
        assert environment == OWN_PYTHON or (folder / ".setup-stamp").exists(), "run `make test-frameworks`"
        python = str(folder / "bin" / "python") if environment else sys.executable
        base = {
            "token": self.store.token(Role.RUNNER),
            "store_target": self.store.target,
            "llm_proxy_url": self.proxy.url.removesuffix("/v1"),
            "llm_proxy_targets": f"127.0.0.1:{self.proxy.parts.server.port}",
            "agents_otlp_http_url": f"http://127.0.0.1:{self.store.parts.ports['http_port']}",
            "inherit_environment": ",".join(self._quiet()),
        }
        runner = RunnerProcess({**base, **settings}, self._quiet(), python=python)
        try:
            yield await runner.start()
        finally:
            await runner.close()

    def _quiet(self) -> dict[str, str]:
        # Instrumentors take the place of the exporter to OpenAI.
        left = {name: value for name, value in QUIET.items() if name != "OPENAI_AGENTS_DISABLE_TRACING"}
        del left["OTEL_SDK_DISABLED"]
        way_out = {"HTTP_PROXY": self.outside.url, "HTTPS_PROXY": self.outside.url, "NO_PROXY": "127.0.0.1"}
        return {**left, **way_out}

    async def run(self, *programs: tuple[dict[str, Any], str]) -> list[Traced]:
        """Runs programs at once, each given as the specification of its agent and a question."""
        return await self.play(*[await self._rollout(spec, question) for spec, question in programs])

    async def play(self, *created: rollout_pb2.Rollout) -> list[Traced]:
        """Creates rollouts, and waits until all have ended."""
        answer = await self.stubs.rollouts.BatchCreateRollouts(
            rollout_service_pb2.BatchCreateRolloutsRequest(rollouts=created)
        )
        names = [rollout.name for rollout in answer.rollouts]
        ended = await self._ended(set(names))
        return [Traced(name=name, rollout=ended[name], roots=await self._tree(name)) for name in names]

    async def _rollout(self, spec: dict[str, Any], question: str) -> rollout_pb2.Rollout:
        files = {path.name: path.read_text() for path in EXAMPLES.iterdir() if path.is_file()}
        bundle = await self.publish("bundle", bundle_of(files | spec.pop("files", {})))
        variables = {"AGENT_MODEL": MODEL, **spec.pop("environment", {})}
        content = spec_of(bundle=bundle, environment=variables, python_grader="grader.py:grade", **spec)
        [rollout] = rollouts_of(
            await self.publish("agent", content), [{"question": question}], max_attempts=1, timeout_s=PROGRAM_S
        )
        return rollout

    async def publish(self, kind: str, content: bytes) -> str:
        """Publishes a bundle or an agent; returns the version's name."""
        version = resource_pb2.ResourceVersion(name=f"resources/{kind}.frameworks", kind=kind, content=content)
        request = resource_service_pb2.PublishResourcesRequest(resources=[version])
        return (await self.stubs.resources.PublishResources(request)).resources[0].name

    async def _ended(self, missing: set[str], limit_s: float = PROGRAM_S + 20) -> dict[str, rollout_pb2.Rollout]:
        found: dict[str, rollout_pb2.Rollout] = {}
        async with asyncio.timeout(limit_s):
            stream = self.stubs.rollouts.WatchRollouts(rollout_service_pb2.WatchRolloutsRequest())
            async for message in stream:
                for rollout in (one for group in message.groups for one in group.rollouts):
                    missing.discard(rollout.name)
                    found[rollout.name] = rollout
                if not missing:
                    break
            stream.cancel()
        return found

    async def _tree(self, name: str) -> list[Node]:
        request = span_service_pb2.ListSpansRequest(parent=name, page_size=1000)
        answer = await self.stubs.spans.ListSpans(request)
        nodes: dict[bytes, Node] = {}
        for record in (each.span for each in answer.spans):
            span = Span.FromString(record.otlp_span)
            call = ModelCallRecord.FromString(record.model_call) if record.model_call else None
            values = {attribute.key: _value(attribute.value) for attribute in span.attributes}
            nodes[span.span_id] = Node(span=span, record=call, attributes=values)
        roots: list[Node] = []
        # Starts in JavaScript are whole milliseconds: of several in one, what ended first began first.
        for node in sorted(
            nodes.values(), key=lambda one: (one.span.start_time_unix_nano, one.span.end_time_unix_nano)
        ):
            parent = nodes.get(node.span.parent_span_id)
            (parent.children if parent is not None else roots).append(node)
        assert {node.span.trace_id.hex() for node in nodes.values()} <= {trace_id_of(name)}
        return roots


def _value(value: AnyValue) -> Any:
    which = value.WhichOneof("value")
    return [_value(one) for one in value.array_value.values] if which == "array_value" else getattr(value, which or "")


def asked(node: Node) -> Any:
    """Returns what a tool was called with, as OpenInference has it."""
    return json.loads(node.attributes.get("input.value", "null"))


@asynccontextmanager
async def a_stage(script: Script = multiply, make: type[Backend] = Backend) -> AsyncIterator[Stage]:
    """Runs a store over PostgreSQL, a backend whose model follows a script, and a proxy with a trainable route to it.

    Args:
        script: what the model says.
        make: the backend's class.
    """
    server = shared_server()
    dsn = server.fresh_database()
    async with (
        running_store(dsn) as store,
        make(script=script) as backend,
        running_proxy(store.target, signing_key=SIGNING_KEY) as proxy,
        Outside() as outside,
    ):
        await proxy.register("one", backend.url)
        await proxy.put_route(target("one"))
        yield Stage(store=store, stubs=await store.stubs(), proxy=proxy, backend=backend, outside=outside)
    server.drop(dsn)


__all__ = ["EXAMPLES", "Node", "Path", "Stage", "Traced", "a_stage", "asked"]
