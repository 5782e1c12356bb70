"""Enables installed instrumentors in every Python process of a command. Loaded first, through PYTHONPATH.

Invariant: the program runs as it would without this file, whatever fails here, including the `sitecustomize` that this
one shadows. It costs nothing if no instrumentor is installed, and little before a framework is imported.
"""

# ruff: noqa: PTH100, PTH120  # Importing pathlib would slow down every Python process.
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
AGENTS = os.path.dirname(os.path.dirname(HERE))
OLDEST_PYTHON = (3, 10)
"""Oldest version that OpenTelemetry supports."""


def run_shadowed() -> None:
    """Runs the `sitecustomize` that this one shadows."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


def start_tracing() -> None:
    """Registers the instrumentors."""
    from importlib.util import find_spec
    from types import ModuleType

    for needed in ("opentelemetry", "wrapt", "opentelemetry.instrumentation", "opentelemetry.sdk"):
        if find_spec(needed) is None:
            return
    if find_spec("fulmen_runner") is None:
        # The runner is not installed here: load the needed modules from the folder of this file.
        for name, folder in (("fulmen_runner", os.path.dirname(AGENTS)), ("fulmen_runner.agents", AGENTS)):
            package = ModuleType(name)
            package.__path__ = [folder]
            sys.modules[name] = package
    from fulmen_runner.agents.tracing.command import start

    start(os.environ)


run_shadowed()
if sys.version_info >= OLDEST_PYTHON and os.environ.get("FULMEN_INSTRUMENT", "none") != "none":
    try:
        start_tracing()
    except Exception as error:  # noqa: BLE001  # Third-party packages of any version.
        print(f"fulmen: tracing is disabled: {type(error).__name__}: {error}", file=sys.stderr)
