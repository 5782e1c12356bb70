"""A per-attempt view of `os.environ` for agents that share the runner's process.

Invariant: inside an attempt, `os.environ`, `os.getenv` and child processes see the attempt's variables; outside an
attempt, and for all other names, they see the process's. Changing one of the attempt's variables affects that attempt
only. Code that reads the environment below Python (C libraries, `os.system`, `os.exec*`) sees the process's.
"""

import asyncio
import asyncio.subprocess
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import wrapt

_ENV_POSITION = 10
"""Position of `env` among the arguments of `subprocess.Popen`, after `self`."""

_view: ContextVar[dict[str, str | None] | None] = ContextVar("fulmen_environment", default=None)
"""The attempt's variables; None for one that the agent has deleted."""


class _AttemptEnviron(os._Environ):
    """`os.environ`, overlaid with the current attempt's variables."""

    def __getitem__(self, key: str) -> str:
        view = _view.get()
        if view is None or key not in view:
            return str(super().__getitem__(key))
        value = view[key]
        if value is None:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: str) -> None:
        view = _view.get()
        if view is None or key not in view:
            super().__setitem__(key, value)
            return
        if not isinstance(value, str):
            raise TypeError(f"str expected, not {type(value).__name__}")
        view[key] = value

    def __delitem__(self, key: str) -> None:
        view = _view.get()
        if view is None or key not in view:
            super().__delitem__(key)
        elif view[key] is None:
            raise KeyError(key)
        else:
            view[key] = None

    def __iter__(self) -> Iterator[str]:
        view = _view.get() or {}
        yield from (key for key in super().__iter__() if key not in view)
        yield from [key for key, value in view.items() if value is not None]

    def __len__(self) -> int:
        return sum(1 for _ in self)


@contextmanager
def viewing(environment: Mapping[str, str]) -> Iterator[None]:
    """Overlays these variables in the body, and in the tasks and threads that it starts."""
    token = _view.set(dict(environment))
    try:
        yield
    finally:
        _view.reset(token)


def show_attempts_environments() -> None:
    """Makes `os.environ` and the starting of child processes heed `viewing`. Idempotent."""
    if isinstance(os.environ, _AttemptEnviron):
        return
    # Changed in place: other modules hold a reference (`from os import environ`).
    os.environ.__class__ = _AttemptEnviron
    wrapt.wrap_function_wrapper(subprocess, "Popen.__init__", _popen)
    # uvloop starts processes without `subprocess`.
    for module in (asyncio, asyncio.subprocess):
        for name in ("create_subprocess_exec", "create_subprocess_shell"):
            wrapt.wrap_function_wrapper(module, name, _create)


def _popen(wrapped: Callable[..., Any], _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > _ENV_POSITION:
        return wrapped(*args, **kwargs)
    return _create(wrapped, _, args, kwargs)


def _create(wrapped: Callable[..., Any], _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _view.get() is not None and kwargs.get("env") is None:
        kwargs = {**kwargs, "env": dict(os.environ)}
    return wrapped(*args, **kwargs)
