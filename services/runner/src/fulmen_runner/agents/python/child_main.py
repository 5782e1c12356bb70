"""Entry point of a child process that runs a Python agent or grader, one attempt after another; see `children`.

Invariant: between attempts, the environment of the process contains no attempt and no attempt key.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from types import FrameType

from fulmen.agent import GRADER_AGENT, Context, acting_as, entered
from fulmen.emit import RewardInvalid
from fulmen_runner.agents.environment import Endpoints
from fulmen_runner.agents.python.callables import PythonCallable, python_callable
from fulmen_runner.agents.python.child_frames import MAX_MESSAGE_BYTES, Document, encode, receive_blocking
from fulmen_runner.agents.python.generators import Stopped, Walked
from fulmen_runner.agents.python.loader import describe_error, load_callable
from fulmen_runner.agents.python.preparation import prepare_process
from fulmen_runner.agents.tracing.child import child_spans
from fulmen_runner.attempts.assignment import decoded_input
from fulmen_runner.attempts.errors import AgentFailed
from fulmen_runner.attempts.outcome import Reward
from fulmen_runner.attempts.program import encode_output
from fulmen_runner.attempts.rewards import reward_of_number, rewards_of_grade
from fulmen_runner.attempts.stragglers import Stragglers

_TELEMETRY_THREADS = "Otel"


class StopAsked(BaseException):
    """The runner is ending this process. Raised inside the agent, so that its resources are closed."""


class Stopper:
    """Runs the agent, and ends it on SIGTERM: cancels its task if it has one, otherwise raises `StopAsked` inside it.

    All attempts run in one event loop: an agent's module may hold a client whose connections belong to the loop.

    Attributes:
        asked: Set on SIGTERM.
        has_left_tasks: Whether the last attempt left tasks in the loop, which were cancelled.
    """

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.has_left_tasks = False
        self._runner = asyncio.Runner()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Walked]] | None = None

    def install(self) -> None:
        """Installs the signal handler; repeated before each attempt, since agents may replace it."""
        signal.signal(signal.SIGTERM, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked.is_set():
            return
        self.asked.set()
        if self._running is None:
            raise StopAsked
        loop, task = self._running
        loop.call_soon_threadsafe(task.cancel)

    def run(self, entry: PythonCallable, arguments: tuple[object, ...]) -> Walked:
        """Calls the agent: a blocking callable in this thread, an async one in an event loop.

        Raises:
            AgentFailed: If it raises.
            StopAsked: On SIGTERM.
        """
        try:
            result = entry.begun(arguments, self.asked) if entry.blocking else entry.function(*arguments)
            if isinstance(result, Walked):
                return result
            # Its threads end with the attempt, those of the loop's own executor would stay.
            with ThreadPoolExecutor(thread_name_prefix="asyncio") as executor:
                # The context of this attempt: the runner keeps that of the first.
                return self._runner.run(self._finish(entry, result, executor), context=copy_context())
        except (StopAsked, Stopped):
            raise StopAsked from None
        except asyncio.CancelledError:
            if self.asked.is_set():
                raise StopAsked from None
            raise AgentFailed("agent cancelled itself") from None
        except BaseException as error:  # noqa: BLE001  # The user's code may raise anything, SystemExit included.
            raise AgentFailed(describe_error(error)) from None

    async def _finish(self, entry: PythonCallable, result: object, executor: ThreadPoolExecutor) -> Walked:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        loop.set_default_executor(executor)
        self._running = loop, task
        try:
            return await entry.finished(result)
        finally:
            self._running = None
            left = asyncio.all_tasks() - {task}
            self.has_left_tasks = bool(left)
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)


class Child:
    """One callable and its attempts.

    Attributes:
        untraced: Why its spans are not sent; empty if they are.
    """

    def __init__(self, setup: Document) -> None:
        self._grading = bool(setup["grading"])
        self._graded = bool(setup["graded"])
        endpoints = Endpoints(**setup["endpoints"])
        prepare_process(endpoints)
        self._spans, self.untraced = child_spans(otlp_url=endpoints.otlp_url, flush_s=setup["flush_s"])
        directory = Path(setup["directory"]) if setup["directory"] else None
        self._entry = python_callable(
            load_callable(setup["target"], directory),
            Stragglers(),
            argument_count=2 if self._grading else 1,
            steps_rewarded=not self._grading,
        )
        self._stopper = Stopper()
        self._stopper.install()

    def attempt(self, request: Document, body: bytes) -> Document:
        """Runs one attempt; returns the answer for the runner.

        Raises:
            StopAsked: On SIGTERM.
        """
        threads = set(threading.enumerate())
        try:
            answer = copy_context().run(self._attempt, request, body)
        except (AgentFailed, RewardInvalid) as error:
            answer = {"error": str(error)}
        self._stopper.install()
        left = [t for t in threading.enumerate() if t not in threads and not t.name.startswith(_TELEMETRY_THREADS)]
        reusable = not left and not self._stopper.has_left_tasks
        return {**answer, "undelivered_spans": self._spans.end(request["attempt"]), "reusable": reusable}

    def _attempt(self, request: Document, body: bytes) -> Document:
        context = Context(
            rollout=request["rollout"],
            attempt=request["attempt"],
            attempt_number=request["attempt_number"],
            mode=request["mode"],
            deadline=time.monotonic() + request["remaining_s"],
            environment=request["environment"],
            resource_versions=request["resource_versions"],
            rewards={
                (dimension, step, bytes.fromhex(span)): value for dimension, step, span, value in request["rewards"]
            },
        )
        task = decoded_input(body, request["content_type"])
        arguments = (task, request["outcome"]) if self._grading else (task,)
        if self._entry.wants_context:
            arguments = (*arguments, context)
        self._spans.begin(key=request["attempt_key"], traceparent=context.environment["TRACEPARENT"])
        with _environment(context), entered(context), acting_as(GRADER_AGENT if self._grading else ""):
            end = self._stopper.run(self._entry, arguments)
        if self._grading:
            own = rewards_of_grade(end.value)
        else:
            own = reward_of_number(end.value) if end.returned and not self._graded else ()
        return {
            "value": None if self._grading else self._sendable(end.value),
            "rewards": [_row(reward) for reward in own],
            "emitted": [[d, step, span.hex(), value] for (d, step, span), value in context.rewards.items()],
        }

    def _sendable(self, value: object) -> object:
        try:
            if len(json.dumps(value)) < MAX_MESSAGE_BYTES // 2:
                return value
        except (TypeError, ValueError, RecursionError):
            if self._graded:
                kind = f"{type(value).__module__}.{type(value).__qualname__}"
                raise AgentFailed(
                    f"outcome cannot be passed to the grader's process: {kind} is not representable in JSON"
                ) from None
            return encode_output(value).content.decode()
        raise AgentFailed(f"outcome exceeds {MAX_MESSAGE_BYTES // 2} bytes")


def main() -> None:
    """Serves attempts on the socket at standard input until the runner closes it."""
    connection = _take_connection()
    first = receive_blocking(connection)
    if first is None:
        return
    try:
        child = Child(first[0])
    except AgentFailed as error:
        connection.sendall(encode({"error": str(error)}))
        return
    connection.sendall(encode({"untraced": child.untraced}))
    try:
        while (request := receive_blocking(connection)) is not None:
            answer = child.attempt(*request)
            _flush_output()
            connection.sendall(encode(answer))
    except StopAsked:
        _flush_output()


def _take_connection() -> socket.socket:
    """Moves the connection from standard input to a descriptor that agents and their children do not use."""
    connection = socket.socket(fileno=os.dup(0))
    with Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return connection


@contextmanager
def _environment(context: Context) -> Iterator[None]:
    before, directory = dict(os.environ), Path.cwd()
    os.environ.update(context.environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.chdir(directory)


def _row(reward: Reward) -> list[object]:
    return [reward.dimension, reward.step, reward.span_id.hex(), reward.value]


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The agent may have closed or replaced it.
        if stream is not None and not stream.closed:
            stream.flush()


if __name__ == "__main__":
    main()
