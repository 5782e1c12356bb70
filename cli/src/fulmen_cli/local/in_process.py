"""All services of a local stack in this process, so that breakpoints work in all of them.

The database stays a child: PostgreSQL cannot be a part of another process. What else is a child by design stays one: the
script that builds first weights, and agents that are commands or containers.

Invariant: the services run in the event loop that starts them, and agents' Python callables in the main thread, one at a
time; so leases are kept alive while the main thread is at a breakpoint.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from fulmen_cli.local.process import ServiceProcess
from fulmen_cli.local.services import PREFIX, ServiceSpec, require_installed
from fulmen_cli.local.stack import LocalStack

if TYPE_CHECKING:
    from fulmen_service_kit.lifecycle import Build
    from fulmen_service_kit.settings import ServiceSettings

__all__ = ["DEBUGGING", "LOG", "InProcessStack", "run_with_agents_in_main_thread"]

LOG: Final = "services"
END_LIMIT_S: Final = 60.0
DEBUGGING: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Leases outlive an hour at a breakpoint.
        "FULMEN_STORE_LEASE_TTL_S": "3600",
        # A breakpoint blocks the event loop; the process must not end for it.
        "FULMEN_RUNNER_LOOP_BLOCKED_LIMIT_S": "0",
        "FULMEN_ALGORITHM_ENGINE_IN_PROCESS": "true",
        # Ctrl-C does not wait for agents.
        "FULMEN_RUNNER_DRAIN_GRACE_S": "1",
        "FULMEN_STORE_DRAIN_GRACE_S": "2",
        "FULMEN_LLM_PROXY_DRAIN_GRACE_S": "2",
        "FULMEN_ALGORITHM_DRAIN_GRACE_S": "5",
    }
)


class InProcessStack(LocalStack):
    """A local stack whose services are tasks of the event loop that starts it."""

    async def start_process(self, spec: ServiceSpec) -> ServiceProcess:
        """Starts a service as a task, whose audit log is written to the services' log."""
        return _Inside(spec, audit_file=self.folder.log_file(LOG))


class _Inside:
    """A service that is a task."""

    def __init__(self, spec: ServiceSpec, *, audit_file: Path) -> None:
        import structlog

        from fulmen_service_kit.lifecycle import run_inside

        settings_class, build = _parts_of(spec.kind)
        with _environment(spec.environment):
            settings = settings_class.from_environment()
        if not settings.audit_file:
            # Standard error belongs to the person and the debugger.
            settings = settings.model_copy(update={"audit_file": str(audit_file)})
        self._stop = asyncio.Event()
        context = contextvars.copy_context()
        context.run(structlog.contextvars.bind_contextvars, service=spec.name)
        self._task: asyncio.Task[int] = asyncio.create_task(
            run_inside(settings, build, self._stop), name=spec.name, context=context
        )

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    @property
    def exit_status(self) -> int | None:
        """The status; None while it runs."""
        return _status(self._task) if self._task.done() else None

    async def wait(self) -> int:
        """Waits for its end."""
        await asyncio.wait({self._task})
        return _status(self._task)

    async def wait_or_hang(self) -> str:
        """Waits for its end; a service at a breakpoint looks the same as one that hangs."""
        return f"exit status {await self.wait()}"

    async def stop(self, grace_s: float) -> int:
        """Asks it to end, and cancels it after the grace."""
        self._stop.set()
        done, _ = await asyncio.wait({self._task}, timeout=grace_s)
        return _status(self._task) if done else await self.kill()

    async def kill(self) -> int:
        """Cancels it."""
        self._task.cancel()
        return await self.wait()


def _parts_of(kind: str) -> tuple[type[ServiceSettings], Build]:
    """Imports a service; returns its settings class and its build function."""
    match kind:
        case "store":
            from fulmen_store import app as store
            from fulmen_store.settings import StoreSettings

            return StoreSettings, store.build
        case "llm_proxy":
            from fulmen_llm_proxy import app as llm_proxy
            from fulmen_llm_proxy.settings import LlmProxySettings

            return LlmProxySettings, llm_proxy.build
        case "algorithm":
            from fulmen_algorithm import app as algorithm
            from fulmen_algorithm.settings import AlgorithmServiceSettings

            return AlgorithmServiceSettings, algorithm.build
        case "console":
            from fulmen_console import app as console
            from fulmen_console.settings import ConsoleSettings

            return ConsoleSettings, console.build
        case "runner":
            from fulmen_runner import app as runner
            from fulmen_runner.settings import RunnerSettings

            return RunnerSettings, runner.build
        case _:
            raise ValueError(f"no service {kind!r}")


def _status(task: asyncio.Task[int]) -> int:
    if task.cancelled():
        return 1
    error = task.exception()
    if error is not None:
        import structlog

        structlog.get_logger().error("service_failed", service=task.get_name(), exc_info=error)
        return 1
    return task.result()


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Replaces all variables with our prefix by these for the body."""
    before = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    given = {name: value for name, value in variables.items() if name.startswith(PREFIX)}
    for name in before:
        del os.environ[name]
    os.environ.update(given)
    try:
        yield
    finally:
        for name in given:
            del os.environ[name]
        os.environ.update(before)


def run_with_agents_in_main_thread(
    work: Callable[[], Coroutine[Any, Any, None]], *, folder: Path, log_file: Path
) -> None:
    """Runs work in an event loop of another thread, while agents' Python callables run in this one, the main thread.

    Args:
        work: The coroutine to run; it starts and stops the stack.
        folder: the agent's files, which are used in place.
        log_file: where the services log to.

    Raises:
        KeyboardInterrupt: on Ctrl-C, when the work has ended or a minute later.
        ExtraMissingError: if the services are not installed.
        BaseException: whatever the work raises.
    """
    require_installed()
    from fulmen_runner.agents.python.loader import load_through
    from fulmen_runner.agents.python.main_thread import MainThread

    main = MainThread()
    load_through(lambda target, _: main.load(target, folder))
    _log_to(log_file)
    started: dict[str, Any] = {}
    failures: list[BaseException] = []

    async def worked() -> None:
        started["loop"], started["task"] = asyncio.get_running_loop(), asyncio.current_task()
        await work()

    def background() -> None:
        try:
            asyncio.run(worked())
        except BaseException as error:  # noqa: BLE001  # Raised again in the thread that waits.
            failures.append(error)
        finally:
            main.end()

    thread = threading.Thread(target=background, name="services", daemon=True)
    thread.start()
    try:
        main.serve()
    except KeyboardInterrupt:
        if "task" in started:
            started["loop"].call_soon_threadsafe(started["task"].cancel)
        thread.join(END_LIMIT_S)
        raise
    thread.join(END_LIMIT_S)
    if failures:
        raise failures[0]


def _log_to(path: Path) -> None:
    """Sends the logs of all services to one file; standard error belongs to the debugger."""
    import structlog

    stream = path.open("a", encoding="utf-8", buffering=1)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
    )
