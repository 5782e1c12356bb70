"""Parts of Agent Lightning that services of Fulmen replace.

Programs may name and make them; a `Trainer` takes them and does not use them. What they did themselves raises NotPorted, which says
where it is.
"""

from __future__ import annotations

from typing import Any

from fulmen.compat.agentlightning.algorithm import NotPorted

__all__ = [
    "AgentOpsTracer",
    "ClientServerExecutionStrategy",
    "DummyTracer",
    "InMemoryLightningStore",
    "LLMProxy",
    "LightningStore",
    "LightningStoreClient",
    "LitAgentRunner",
    "OtelTracer",
    "SharedMemoryExecutionStrategy",
    "Tracer",
    "configure_logger",
    "setup_logging",
]


class _Replaced:
    """A part that a service replaces."""

    _by = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes their arguments."""

    def __class_getitem__(cls, _: Any) -> type[_Replaced]:
        """Returns the class: a type of tasks makes no difference."""
        return cls

    def __getattr__(self, name: str) -> Any:
        """Raises NotPorted for what they do themselves."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotPorted(f"{type(self).__name__}.{name} is not available: {self._by}")


class Tracer(_Replaced):
    """Theirs records spans; here the LLM proxy records model calls, and runners the rest (docs/tracing.md)."""

    _by = "model calls are recorded by the LLM proxy, spans by the runner (docs/tracing.md)."


class OtelTracer(Tracer):
    """See `Tracer`."""


class AgentOpsTracer(Tracer):
    """See `Tracer`."""


class DummyTracer(Tracer):
    """See `Tracer`."""


class LightningStore(_Replaced):
    """Theirs is the queue; here the store service, which `fulmen.Client` reads and writes."""

    _by = "use fulmen.Client(): rollouts, spans and resources are there (docs/python.md)."


class InMemoryLightningStore(LightningStore):
    """See `LightningStore`."""


class LightningStoreClient(LightningStore):
    """See `LightningStore`."""


class LitAgentRunner(_Replaced):
    """Theirs runs agents; here runners are services, and `fulmen agent check` runs one task by hand."""

    _by = "run one task with `fulmen agent check`, or tasks with Trainer.dev (docs/debugging.md)."


class LLMProxy(_Replaced):
    """Theirs wraps LiteLLM; here the LLM proxy is a service with routes (docs/routing.md)."""

    _by = "models are routes of the LLM proxy (docs/routing.md)."


class ClientServerExecutionStrategy(_Replaced):
    """Theirs starts processes; here services are started by `fulmen up`, Compose or Kubernetes."""

    _by = "services are started by `fulmen up`."


class SharedMemoryExecutionStrategy(ClientServerExecutionStrategy):
    """See `ClientServerExecutionStrategy`."""


def setup_logging(level: str | int = "INFO", **_: Any) -> None:
    """Configures Python's logging, as theirs does, at this level."""
    import logging

    logging.basicConfig(level=level, format="%(asctime)s [%(levelname)s] %(name)s: %(message)s")


def configure_logger(level: int = 20, name: str = "agentlightning") -> Any:
    """Returns a logger; theirs is deprecated in favour of `setup_logging`."""
    import logging

    setup_logging(level)
    return logging.getLogger(name)
