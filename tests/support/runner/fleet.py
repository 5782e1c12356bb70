"""Three runner processes of one store, agents of every kind, and means to do them harm."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import zstandard
from opentelemetry.proto.trace.v1 import trace_pb2

from fulmen.rpc.channel import FulmenChannel, open_channel
from fulmen.runner.v1 import runner_service_pb2, runner_service_pb2_grpc
from fulmen.runner.v1.agent_spec_pb2 import Isolation
from fulmen.store.v1 import (
    attempt_pb2,
    failure_pb2,
    rollout_pb2,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    span_pb2,
    span_service_pb2,
    span_service_pb2_grpc,
)
from fulmen_service_kit.security.tokens import Role
from tests.support.runner.harness import RunnerProcess, bundle_of, rollouts_of, spec_of, token
from tests.support.runner.oracle import Expected
from tests.support.runner.stores import RealStore

__all__ = ["Fleet", "Kind", "Kinds", "Watched", "publish_kinds", "stored_spans"]

MARKER = "FULMEN_TEST_FLEET"
SLOTS = 8
DRAIN_GRACE_S = 1.5
PROGRESS_LIMIT_S = 120.0
SPAN_BATCH = 200
MAX_ATTEMPTS = 3
WAITING = 10
LEAST_SLOTS = 4

AGENT = """
import asyncio, os, subprocess, time
from pathlib import Path
import httpx2
from opentelemetry import trace
from fulmen import emit_reward

tracer = trace.get_tracer("fleet")

def began(task, context):
    path = Path(task["ledger"], f"{context.rollout.rpartition('/')[2]}-{context.attempt_number}")
    os.close(os.open(path, os.O_CREAT | os.O_EXCL))  # Fails where an attempt is run twice.
    return path
async def spans(task, context):
    began(task, context)
    with tracer.start_as_current_span("outer"):
        await asyncio.sleep(task["work_s"])
        with tracer.start_as_current_span("inner"):
            emit_reward(context.attempt_number, dimension="style")
    return context.attempt_number
async def calls(task, context):
    began(task, context)
    async with httpx2.AsyncClient(timeout=60, trust_env=False) as client:
        headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        answer = await client.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", json={"model": "m"}, headers=headers)
    assert answer.json()["choices"][0]["message"]["content"] == context.attempt
    return context.attempt_number
async def waits(task, context):
    path = began(task, context)
    try:
        while context.attempt_number == 1 and not Path(task["gate"]).exists():
            await asyncio.sleep(0.05)
    except asyncio.CancelledError:
        path.with_suffix(".stopped").touch()
        raise
    return context.attempt_number
def blocks(task, context):
    began(task, context)
    time.sleep(task["work_s"])
    return context.attempt_number
def steps(task, context):
    began(task, context)
    for _ in range(2):
        time.sleep(task["work_s"] / 2)
        yield context.attempt_number
async def async_steps(task, context):
    began(task, context)
    for _ in range(2):
        await asyncio.sleep(task["work_s"] / 2)
        yield context.attempt_number
def child(task, context):
    began(task, context)
    emit_reward(context.attempt_number, dimension="style")
    if task["number"] % 5 == 0:
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
    time.sleep(task["work_s"])
    return context.attempt_number
"""
COMMAND = """set -C; : > "{task.ledger}/${{FULMEN_ROLLOUT#projects/default/rollouts/}}-$FULMEN_ATTEMPT" || exit 9
(setsid sleep 3600 >/dev/null 2>&1 &)
sleep {task.work_s}
echo '{{"dimension": "style", "value": '$FULMEN_ATTEMPT'}}' >> "$FULMEN_REWARDS_FILE"
echo $FULMEN_ATTEMPT"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of agent: how often there is one of it, how it is asked for, and what it leaves."""

    share: int
    expected: Expected
    command: bool = False
    own_process: bool = False


def _leaves(*rewards: tuple[str, int | None], spans: tuple[str, ...] = ()) -> Expected:
    return Expected(rewards=frozenset(rewards), spans=spans)


_ONE = ("reward", None)
_STYLE = ("style", None)
_STEPS = (("reward", 0), ("reward", 1))

Kinds = Mapping[str, Kind]
KINDS: Kinds = {
    "spans": Kind(share=8, expected=_leaves(_ONE, _STYLE, spans=("outer", "inner"))),
    "calls": Kind(share=4, expected=_leaves(_ONE)),
    "waits": Kind(share=0, expected=_leaves(_ONE)),
    "blocks": Kind(share=5, expected=_leaves(_ONE)),
    "steps": Kind(share=3, expected=_leaves(*_STEPS)),
    "async_steps": Kind(share=3, expected=_leaves(*_STEPS)),
    "child": Kind(share=2, expected=_leaves(_ONE, _STYLE), own_process=True),
    "command": Kind(share=3, expected=_leaves(_ONE, _STYLE), command=True),
}


async def publish_kinds(store: RealStore) -> dict[str, str]:
    """Publishes an agent of every kind; returns the versions by kind."""
    bundle = await store.publish("bundle.fleet", bundle_of({"agent.py": AGENT}))
    published = {}
    for name, kind in KINDS.items():
        if kind.command:
            spec = spec_of(bundle=bundle, command=("bash", "-c", COMMAND))
        else:
            isolation = Isolation.ISOLATION_PROCESS if kind.own_process else Isolation.ISOLATION_UNSPECIFIED
            spec = spec_of(bundle=bundle, python=f"agent.py:{name}", isolation=isolation)
        published[name] = await store.publish(f"agent.{name}", spec)
    return published


async def create_work(
    store: RealStore, agents: Mapping[str, str], folder: Path, rng: random.Random, *, count: int
) -> dict[str, Expected]:
    """Queues rollouts of all kinds, mixed; returns what each is to leave."""
    kinds = rng.choices(list(KINDS), weights=[kind.share for kind in KINDS.values()], k=count)
    # Spread, and fewer than the fewest slots of all runners: they give up their slots only when they are stopped.
    kinds[:: -(-count // WAITING)] = ["waits"] * WAITING
    batch = []
    for number, kind in enumerate(kinds):
        task = {
            "number": number,
            "work_s": round(rng.uniform(0.02, 0.4), 3),
            "ledger": str(folder / "ledger"),
            "gate": str(folder / "gate"),
        }
        batch += rollouts_of(agents[kind], [task], timeout_s=300, max_attempts=MAX_ATTEMPTS)
    names = await store.create(batch)
    return {name: KINDS[kind].expected for name, kind in zip(names, kinds, strict=True)}


@dataclass(slots=True)
class Watched:
    """The feed of finished rollouts, as it comes."""

    rollouts: list[rollout_pb2.Rollout] = field(default_factory=list)
    _news: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def follow(self, channel: FulmenChannel) -> None:
        """Reads until it is cancelled."""
        stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        async for message in stub.WatchRollouts(rollout_service_pb2.WatchRolloutsRequest()):
            async with self._news:
                self.rollouts += [rollout for group in message.groups for rollout in group.rollouts]
                self._news.notify_all()

    async def until(self, count: int) -> None:
        """Waits until so many rollouts have finished."""
        async with asyncio.timeout(PROGRESS_LIMIT_S), self._news:
            await self._news.wait_for(lambda: len(self.rollouts) >= count)


class Fleet:
    """The runners; each harm returns when its runner works again."""

    def __init__(self, store: RealStore, folder: Path, *, count: int, settings: Mapping[str, object]) -> None:
        self._folder = folder
        self._channel = open_channel(store.target, token=token(Role.CLIENT))
        self._rollouts = rollout_service_pb2_grpc.RolloutServiceStub(self._channel)
        self._settings = {"store_target": store.target, "log_level": "debug", "slots": SLOTS, **settings}
        self._settings |= {"drain_grace_s": DRAIN_GRACE_S, "inherit_environment": MARKER}
        self._runners: list[RunnerProcess] = [self._new(index) for index in range(count)]
        self.harms: Mapping[str, Callable[[int, random.Random], Awaitable[None]]] = {
            "kill": self.kill, "pause": self.pause, "drain": self.drain, "slots": self.slots,
        }  # fmt: skip

    @property
    def marker(self) -> str:
        """What every process of the fleet has in its environment."""
        return f"{MARKER}={self._folder}"

    async def start(self) -> None:
        """Starts every runner."""
        await asyncio.gather(*(runner.start() for runner in self._runners))

    async def kill(self, index: int, _: random.Random) -> None:
        """Kills a runner, and starts another in its place."""
        self._runners[index].send(signal.SIGKILL)
        await self._again(index, status=-signal.SIGKILL)

    async def drain(self, index: int, _: random.Random) -> None:
        """Stops a runner as an operator does, and starts another in its place."""
        self._runners[index].send(signal.SIGTERM)
        await self._again(index, status=0)

    async def pause(self, index: int, _: random.Random) -> None:
        """Pauses a runner until its leases are lost, resumes it, and waits until it has stopped their attempts."""
        runner = self._runners[index]
        runner.send(signal.SIGSTOP)
        held = _running(runner)
        sessions = len([line for line in runner.log if line["event"] == "session_opened"])
        lost = {attempt for attempt in held if await self._how_it_ended(attempt) == failure_pb2.FAILURE_KIND_LEASE_LOST}
        runner.send(signal.SIGCONT)
        if lost:
            await runner.logged("session_opened", count=sessions + 1)
        async with asyncio.timeout(PROGRESS_LIMIT_S):
            while lost & set(_running(runner)):  # noqa: ASYNC110  # The log of another process.
                await asyncio.sleep(0.05)

    async def slots(self, index: int, rng: random.Random) -> None:
        """Changes how many attempts a runner runs at once."""
        port = (await self._runners[index].ports())["port"]
        async with open_channel(f"127.0.0.1:{port}", token=token()) as channel:
            stub = runner_service_pb2_grpc.RunnerServiceStub(channel)
            await stub.SetSlots(runner_service_pb2.SetSlotsRequest(slot_count=rng.randint(LEAST_SLOTS, 2 * SLOTS)))

    async def stop(self) -> None:
        """Ends every runner well."""
        for runner in self._runners:
            runner.send(signal.SIGTERM)
        assert [await runner.exit_code() for runner in self._runners] == [0] * len(self._runners)

    async def close(self) -> None:
        """Ends what still runs."""
        for runner in self._runners:
            await runner.close()
        await self._channel.close()

    async def _again(self, index: int, *, status: int) -> None:
        old = self._runners[index]
        assert await old.exit_code() == status, "\n".join(old.tail)
        self._runners[index] = await self._new(index).start()

    def _new(self, index: int) -> RunnerProcess:
        work_dir = self._folder / f"work-{index}"
        work_dir.mkdir(exist_ok=True)
        return RunnerProcess({**self._settings, "work_dir": work_dir}, {MARKER: str(self._folder)})

    async def _how_it_ended(self, attempt: str) -> int:
        name, _, number = attempt.partition("/attempts/")
        async with asyncio.timeout(PROGRESS_LIMIT_S):
            while True:
                answer = await self._rollouts.GetRollout(rollout_service_pb2.GetRolloutRequest(name=name))
                shown = answer.rollout.attempts[int(number) - 1]
                if shown.state != attempt_pb2.ATTEMPT_STATE_RUNNING:
                    return shown.failure_kind
                await asyncio.sleep(0.1)


def _running(runner: RunnerProcess) -> list[str]:
    """Returns the attempts that a runner's log says it runs."""
    running: dict[str, None] = {}
    for line in runner.log:
        if line["event"] == "attempt_started":
            running[line["attempt"]] = None
        elif line["event"] in ("attempt_finished", "attempt_stopped"):
            running.pop(line["attempt"], None)
    return list(running)


async def stored_spans(channel: FulmenChannel, attempts: Sequence[str]) -> dict[str, list[tuple[str, bytes]]]:
    """Returns the names and ids of the stored spans, by attempt."""
    stub = span_service_pb2_grpc.SpanServiceStub(channel)
    found: dict[str, list[tuple[str, bytes]]] = {}
    for start in range(0, len(attempts), SPAN_BATCH):
        request = span_service_pb2.StreamSpansRequest(parents=attempts[start : start + SPAN_BATCH])
        async for message in stub.StreamSpans(request):
            for chunk in message.chunks:
                payload = chunk.payload
                if chunk.codec == span_pb2.SPAN_CODEC_ZSTD:
                    payload = zstandard.ZstdDecompressor().decompressobj().decompress(payload)
                spans = [
                    trace_pb2.Span.FromString(record.otlp_span)
                    for record in span_pb2.SpanBatch.FromString(payload).spans
                ]
                found.setdefault(chunk.attempt, []).extend((span.name, span.span_id) for span in spans)
    return found
