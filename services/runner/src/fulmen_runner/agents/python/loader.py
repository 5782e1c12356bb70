"""Loads Python callables from a bundle or an installed package.

Invariant: bundles never see each other's modules. The entry file has a unique module name per bundle; before another
bundle is loaded, modules imported from an earlier one are removed from `sys.modules` (running code keeps its own).
"""

import hashlib
import importlib
import importlib.util
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from fulmen_runner.attempts.errors import AgentFailed

_loading = threading.Lock()
"""Held during an import, which changes `sys.path`. Taken in threads only."""

_bundle_roots: set[Path] = set()

_RUNNER = str(Path(__file__).parents[1])
_STDLIB = (f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ")
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_LIBRARIES = (*_STDLIB, *_INSTALLED)
_MAX_NAMES_SHOWN = 10

Load = Callable[[str, Path | None], Callable[..., object]]
_override: list[Load] = []


def load_through(load: Load) -> None:
    """Replaces the loader of this process, for debugging."""
    _override[:] = [load]


def load_callable(target: str, bundle_dir: Path | None) -> Callable[..., object]:
    """Loads a callable with `load_in_place` or its replacement; see `load_through`."""
    return _override[0](target, bundle_dir) if _override else load_in_place(target, bundle_dir)


def load_in_place(target: str, bundle_dir: Path | None) -> Callable[..., object]:
    """Loads `file.py:name` or `package.module:name`. Blocks during the import: call it in a thread.

    Args:
        target: The callable; a file is relative to the bundle, or to the working directory without one.
        bundle_dir: The unpacked bundle, put first on the import path.

    Raises:
        AgentFailed: If the module cannot be imported or has no such callable.
    """
    location, _, name = target.partition(":")
    if not location or not name:
        raise AgentFailed(f"Python target {target!r} must have the form `file.py:name` or `package.module:name`")
    with _loading:
        if bundle_dir is not None:
            _enter_bundle(bundle_dir)
        try:
            if location.endswith(".py"):
                module = _load_file((bundle_dir or Path.cwd()) / location)
            else:
                module = importlib.import_module(location)
        except AgentFailed:
            raise
        except (Exception, SystemExit) as error:  # noqa: BLE001  # The user's module may raise anything.
            raise AgentFailed(f"{location} cannot be imported\n{describe_error(error)}") from None
    loaded: object = module
    for part in name.split("."):
        loaded = getattr(loaded, part, None)
    if not callable(loaded):
        raise AgentFailed(f"{location} has no callable {name!r}{_candidates(module)}")
    return loaded


def describe_error(error: BaseException) -> str:
    """Formats an exception of an agent: from its first frame outside the runner and the standard library, with file
    names relative to the bundle.
    """
    summary = traceback.TracebackException.from_exception(error)
    seen: list[traceback.TracebackException] = [summary]
    for part in seen:
        frames = _frames_of_agent(part.stack)
        if part is not summary and all(frame.filename.startswith(_LIBRARIES) for frame in frames):
            # A cause deep inside a library.
            frames = frames[-1:]
        part.stack = traceback.StackSummary.from_list(frames)
        seen += [each for each in (part.__cause__, part.__context__, *(part.exceptions or ())) if each is not None]
    text = "".join(summary.format()).rstrip()
    for root in _bundle_roots:
        text = text.replace(f'"{root}{os.sep}', '"')
    return text


def _frames_of_agent(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    left = [frame for frame in frames if not frame.filename.startswith(_RUNNER)]
    while left and left[0].filename.startswith(_STDLIB) and not left[0].filename.startswith(_INSTALLED):
        left.pop(0)
    return left


def _candidates(module: ModuleType) -> str:
    """Returns a hint with the module's own callables, empty if it has none."""
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]
    return f"; it has {', '.join(own[:_MAX_NAMES_SHOWN])}" if own else ""


def _enter_bundle(bundle_dir: Path) -> None:
    if str(bundle_dir) in sys.path and sys.path[0] == str(bundle_dir):
        return
    # One string comparison per module, since a runner may have seen hundreds of bundles.
    others = tuple(f"{root}{os.sep}" for root in _bundle_roots if root != bundle_dir)
    # A copy, since agents that run meanwhile import, too; no attribute of a module is accessed, since lazy ones may raise.
    for name, module in sys.modules.copy().items():
        origin = getattr(module, "__dict__", {}).get("__file__")
        if isinstance(origin, str) and origin.startswith(others):
            sys.modules.pop(name, None)
    _bundle_roots.add(bundle_dir)
    sys.path[:] = [str(bundle_dir), *(path for path in sys.path if Path(path) not in _bundle_roots)]
    importlib.invalidate_caches()


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise AgentFailed(f"file {path.name!r} of the agent does not exist")
    name = f"fulmen_agent_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AgentFailed(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
