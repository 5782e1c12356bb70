"""The world around a run, in one process: the store's queue, the engine and the agent without any service between.

The algorithm, the trainer and the sampling code are those of the service; only transport is missing, so an experiment
takes a fraction of the time. Metrics of whole systems come from the real services (`stand.py`), not from here.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib.util
import json
import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from openai.types.chat import ChatCompletion

from fulmen.agent import FINAL_DIMENSION
from fulmen.errors import ResourceNotFound
from fulmen_algorithm.engines.embedded.__main__ import arguments
from fulmen_algorithm.engines.embedded.__main__ import build as build_engine
from fulmen_algorithm.engines.embedded.adapters import prepare_adapters
from fulmen_algorithm.engines.embedded.chat import Completion
from fulmen_algorithm.engines.embedded.generator import Generator
from fulmen_algorithm.engines.embedded.protocol import parse_chat_request
from fulmen_algorithm.engines.embedded.server import EngineServer
from fulmen_algorithm.engines.embedded.text import TextStream
from fulmen_algorithm.engines.embedded.weights import prepare_full
from fulmen_algorithm.rollouts.groups import FinishedGroup, FinishedRollout, GroupSpec
from fulmen_algorithm.rollouts.trajectory import RolloutTrajectory, TokenSequence
from fulmen_algorithm.runs.ports import Content, Notify, PublishedPolicy, SwapStats
from fulmen_algorithm.training.settings import WeightsKind

AGENT_HEADER = "x-fulmen-agent"
Answer = dict[str, Any]
_calls: contextvars.ContextVar[_Calls] = contextvars.ContextVar("calls")


@dataclass(slots=True, kw_only=True)
class _Calls:
    """The model calls of one rollout, in order."""

    mode: str
    answers: list[tuple[str, Answer]] = field(default_factory=list)
    """Which agent called, and what the answer was."""


class Engine:
    """The embedded engine without its HTTP surface; it is the port `Serving`."""

    def __init__(self) -> None:
        self._stack = AsyncExitStack()
        self._generator: Generator | None = None
        self._server: EngineServer | None = None
        self._overrides: Mapping[str, Mapping[str, object]] = {}
        self._before = 0
        self.calls = 0

    async def serve(self, policy: PublishedPolicy, overrides: Mapping[str, str], notify: Notify) -> None:
        """Loads a version."""
        await self.close()
        model = policy.base_model if policy.kind is WeightsKind.LORA else policy.path
        flags = ["--model", str(model), "--version", str(policy.version), "--max-batch-size", "256"]
        flags += ["--served-model-name", policy.policy]
        flags += [f"--adapter={name}={folder}" for name, folder in policy.adapters.items()]
        self._generator, self._server = build_engine(arguments([*flags, "--max-waiting", "1000000"]), None)
        self._overrides = {mode: json.loads(fields) for mode, fields in overrides.items()}
        await self._stack.enter_async_context(self._generator)

    async def swap(self, policy: PublishedPolicy) -> SwapStats:
        """Puts another version in."""
        assert self._generator is not None
        if policy.kind is WeightsKind.LORA:
            weights = await asyncio.to_thread(prepare_adapters, self._generator.model, policy.adapters)
        else:
            weights = await asyncio.to_thread(prepare_full, self._generator.model, policy.path)
        return SwapStats(pause_s=await self._generator.swap(weights, policy.version))

    async def sampled_tokens(self) -> int:
        """Counts."""
        return self._before + (self._generator.stats.tokens if self._generator else 0)

    def release(self) -> None:
        """Keeps what it serves."""

    async def close(self) -> None:
        """Ends the model's thread."""
        self._before = await self.sampled_tokens()
        self._generator = None
        await self._stack.aclose()

    async def create(self, *, extra_headers: Mapping[str, str] | None = None, **body: Any) -> ChatCompletion:
        """Stands for `client.chat.completions.create`: asks for tokens, as the proxy does, and keeps them."""
        assert self._generator is not None
        assert self._server is not None
        calls = _calls.get()
        self.calls += 1
        forced = self._overrides.get(calls.mode, {})
        request = parse_chat_request({**body, **forced, "logprobs": True, "return_token_ids": True})
        renderer = self._server.renderer
        prompt_ids = renderer.prompt_ids(request)
        room = renderer.max_model_tokens - len(prompt_ids)
        completion = Completion(
            request=request,
            prompt_ids=prompt_ids,
            max_tokens=min(request.sampling.max_tokens, room),
            eos_token_ids=self._generator.eos_token_ids,
            text=TextStream(renderer.tokenizer.backend_tokenizer, stop=(), expect_tool_calls=bool(request.tools)),
            tokenizer=renderer.tokenizer,
        )
        sampling = replace(request.sampling, max_tokens=completion.max_tokens)
        adapter = self._server.model_names[request.model]
        await self._generator.generate(prompt_ids, sampling, completion.push, adapter=adapter)
        answer = completion.answer()
        calls.answers.append(((extra_headers or {}).get(AGENT_HEADER, ""), answer))
        return ChatCompletion.model_validate(answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """An example's agent and its grader."""

    solve: Callable[[Any], Awaitable[Any]]
    grade: Callable[[Any, Any], float | Mapping[str, float]]

    @classmethod
    def load(cls, folder: Path, engine: Engine, *, target: str = "agent.py:solve") -> Agent:
        """Imports an example's agent and `grader.py`, and puts the engine in the place of the agent's client."""
        os.environ.setdefault("OPENAI_API_KEY", "none")  # a client refuses to be made without
        module = load_script(folder / target.partition(":")[0])
        module.client = SimpleNamespace(chat=SimpleNamespace(completions=engine))  # type: ignore[attr-defined]
        return cls(solve=getattr(module, target.partition(":")[2]), grade=load_script(folder / "grader.py").grade)


def load_script(path: Path) -> ModuleType:
    """Imports a script by its file, which may import others of its folder."""
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Queue:
    """The port `RolloutQueue`: agents run in this event loop, `slots` at a time."""

    def __init__(self, agent: Agent, *, slots: int) -> None:
        self._agent = agent
        self._slots = slots
        self._jobs: asyncio.PriorityQueue[tuple[int, int, GroupSpec, int]] = asyncio.PriorityQueue()
        self._done: dict[str, dict[int, FinishedRollout]] = {}
        self._submitted: set[str] = set()
        self._feed: list[FinishedGroup] = []
        self._grown = asyncio.Event()
        self._found: dict[str, RolloutTrajectory] = {}
        self._workers: list[asyncio.Task[None]] = []
        self.rows = 0
        self.calls = 0

    async def __aenter__(self) -> Queue:
        """Starts the slots."""
        self._workers = [asyncio.create_task(self._work(), name=f"slot-{i}") for i in range(self._slots)]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends the slots."""
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def submit(self, groups: Sequence[GroupSpec]) -> None:
        """Adds groups that are not known."""
        for group in groups:
            if group.group_id not in self._submitted:
                self._submitted.add(group.group_id)
                for member in range(group.size):
                    self._jobs.put_nowait((-group.priority, len(self._submitted) * 1000 + member, group, member))

    async def watch(self, cursor: str) -> AsyncGenerator[FinishedGroup, None]:
        """Yields finished groups, for ever."""
        position = int(cursor or 0)
        while True:
            grown = self._grown
            while position < len(self._feed):
                position += 1
                yield self._feed[position - 1]
            for worker in self._workers:
                if worker.done():
                    worker.result()
            await grown.wait()

    async def finished(self, groups: Sequence[GroupSpec]) -> list[FinishedGroup]:
        """Submits groups that are not known; returns them in their order once all have finished."""
        wanted = [group.group_id for group in groups]
        found: dict[str, FinishedGroup] = {}
        async with aclosing(self.watch(str(len(self._feed)))) as feed:
            await self.submit(groups)
            while len(found) < len(wanted):
                group = await anext(feed)
                if group.group_id in wanted:
                    found[group.group_id] = group
        return [found[name] for name in wanted]

    async def trajectories(self, attempts: Sequence[str]) -> dict[str, RolloutTrajectory]:
        """Hands over what the policy did, once."""
        return {name: self._found.pop(name) for name in attempts if name in self._found}

    async def known_train_groups(self, *, below: int, branch: int) -> set[int]:
        """Knows none: a run begins and ends with its process."""
        return set()

    async def cancel_all(self) -> None:
        """Does nothing: no runner is connected."""

    async def finished_of(self, training_run: str) -> list[FinishedGroup]:
        """Knows no other run."""
        return []

    async def _work(self) -> None:
        try:
            while True:
                _, _, group, member = await self._jobs.get()
                name = f"projects/default/rollouts/{group.group_id}.{member}"
                rollout, trajectory = await self._rollout(name, group)
                self._found[name] = trajectory
                members = self._done.setdefault(group.group_id, {})
                members[member] = rollout
                if len(members) == group.size:
                    del self._done[group.group_id]
                    ordered = tuple(members[i] for i in sorted(members))
                    cursor = str(len(self._feed) + 1)
                    self._feed.append(FinishedGroup(group_id=group.group_id, rollouts=ordered, cursor=cursor))
                    self._wake()
        finally:
            self._wake()

    def _wake(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def _rollout(self, name: str, group: GroupSpec) -> tuple[FinishedRollout, RolloutTrajectory]:
        calls = _Calls(mode=group.mode.value)
        _calls.set(calls)
        task = json.loads(group.task)
        outcome = await self._agent.solve(task)
        trajectory = merged(calls.answers)
        if group.mode.value == "train":
            self.rows += len(trajectory.sequences)
            self.calls += len(calls.answers)
        graded = self._agent.grade(task, outcome)
        rewards = graded if isinstance(graded, Mapping) else {FINAL_DIMENSION: graded}
        rollout = FinishedRollout(
            name=name,
            attempt=name,
            succeeded=True,
            reward=rewards.get(FINAL_DIMENSION),
            rewards={(dimension, None, b""): float(value) for dimension, value in rewards.items()},
            output=str(outcome),
            task=group.task,
        )
        return rollout, trajectory


def merged(answers: Sequence[tuple[str, Answer]]) -> RolloutTrajectory:
    """Merges the calls of a rollout: a call goes on with the row of its agent that its prompt begins with."""
    rows: list[dict[str, list[Any]]] = []
    roles: list[str] = []
    for role, answer in answers:
        choice, prompt = answer["choices"][0], answer["prompt_token_ids"]
        mine = [r for r, own in zip(rows, roles, strict=True) if own == role]
        row = next((r for r in mine if prompt[: len(r["token_ids"])] == r["token_ids"]), None)
        if row is None:
            row = {"token_ids": [], "loss_mask": [], "logprobs": [], "policy_versions": []}
            rows.append(row)
            roles.append(role)
        added = prompt[len(row["token_ids"]) :]
        sampled = choice["token_ids"]
        row["token_ids"] += [*added, *sampled]
        row["loss_mask"] += [False] * len(added) + [True] * len(sampled)
        row["logprobs"] += [0.0] * len(added) + [t["logprob"] for t in choice["logprobs"]["content"]]
        versions = [v["version"] for v in answer["weight_versions"] for _ in range(v["start"], v["end"])]
        row["policy_versions"] += [0] * len(added) + versions
    last = answers[-1][1]["choices"][0]["message"] if answers else {}
    return RolloutTrajectory(
        sequences=tuple(
            TokenSequence(
                token_ids=tuple(row["token_ids"]),
                loss_mask=tuple(row["loss_mask"]),
                logprobs=tuple(row["logprobs"]),
                policy_versions=tuple(row["policy_versions"]),
                role=role,
            )
            for row, role in zip(rows, roles, strict=True)
        ),
        truncated=any(a["choices"][0]["finish_reason"] == "length" for _, a in answers),
        answer_text=str(last.get("content") or last.get("tool_calls") or ""),
    )


class Resources:
    """The port `ResourceStore`, in memory."""

    def __init__(self) -> None:
        self._versions: dict[str, list[bytes]] = {}

    def put(self, resource: str, data: bytes) -> str:
        """Publishes a version; returns its name."""
        versions = self._versions.setdefault(resource, [])
        versions.append(data)
        return f"{resource}/versions/{len(versions)}"

    async def get(self, name: str) -> Content:
        """Reads a version, or the newest."""
        resource, _, number = name.partition("/versions/")
        versions = self._versions.get(resource, [])
        version = int(number or len(versions))
        if not 1 <= version <= len(versions):
            raise ResourceNotFound("There is no such resource.", resource=name)
        kind = resource.removeprefix("resources/").partition(".")[0]
        return Content(name=f"{resource}/versions/{version}", kind=kind, version=version, data=versions[version - 1])

    async def publish(
        self, *, resource: str, kind: str, content: bytes, content_type: str, parent: str, request_id: str
    ) -> Content:
        """Publishes a version."""
        return await self.get(self.put(resource, content))

    async def point(self, resource: str, alias: str, version: int) -> None:
        """Keeps no aliases."""

    async def has_rollouts(self, training_run: str) -> bool:
        """Tells that no other run has any."""
        return False
