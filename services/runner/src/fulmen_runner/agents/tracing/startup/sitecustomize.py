"""Runs first in every Python that a command starts, since its folder is on their PYTHONPATH: switches on the instrumentors
that are installed there.

Invariant: the program runs as it would without this file, whatever fails here, and with the `sitecustomize` that this
one hides. It costs nothing where no instrumentor is installed, and little before a framework is imported.
"""

# ruff: noqa: PTH100, PTH120  # pathlib would take its time in every Python.
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
AGENTS = os.path.dirname(os.path.dirname(HERE))
OLDEST_PYTHON = (3, 10)
"""OpenTelemetry needs no newer one."""


def run_hidden() -> None:
    """Runs the `sitecustomize` that would have run instead."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def start_tracing() -> None:
    """Begins to wait for frameworks that can be traced."""
    from importlib.util import find_spec
    from types import ModuleType

    for needed in ("opentelemetry", "wrapt", "opentelemetry.instrumentation", "opentelemetry.sdk"):
        if find_spec(needed) is None:
            return
    if find_spec("fulmen_runner") is None:
        # This Python has no runner installed: its few modules that are needed are taken from where this file lies.
        for name, folder in (("fulmen_runner", os.path.dirname(AGENTS)), ("fulmen_runner.agents", AGENTS)):
            package = ModuleType(name)
            package.__path__ = [folder]
            sys.modules[name] = package
    from fulmen_runner.agents.tracing.command import start

    start(os.environ)


run_hidden()
if sys.version_info >= OLDEST_PYTHON and os.environ.get("FULMEN_INSTRUMENT", "none") != "none":
    try:
        start_tracing()
    except Exception as error:  # noqa: BLE001  # A foreign Python, with packages of any version.
        print(f"fulmen: this program is not traced: {type(error).__name__}: {error}", file=sys.stderr)
