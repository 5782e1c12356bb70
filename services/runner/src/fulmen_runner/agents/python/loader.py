"""Loads Python callables, from a bundle or from what is installed.

Invariant: bundles never see each other's modules. The entry file has a module name of its own for each bundle; before
another bundle is loaded, plain module names that came from an earlier one are forgotten (what runs keeps its modules).
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
"""One import at a time: it changes the import path of the process. Taken in threads only."""

_bundle_roots: set[Path] = set()

_HERE = str(Path(__file__).parents[1])
_PYTHONS_OWN = (f"{sysconfig.get_path('stdlib')}{os.sep}", "<frozen ")
_INSTALLED = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_LIBRARIES = (*_PYTHONS_OWN, *_INSTALLED)
_MAX_NAMES_SHOWN = 10

Load = Callable[[str, Path | None], Callable[..., object]]
_instead: list[Load] = []


def load_through(load: Load) -> None:
    """Makes `load` what all callables of this process are loaded by from now on; for debugging."""
    _instead[:] = [load]


def load_callable(target: str, bundle_dir: Path | None) -> Callable[..., object]:
    """Loads a callable as `load_in_place` does, or as `load_through` says."""
    return _instead[0](target, bundle_dir) if _instead else load_in_place(target, bundle_dir)


def load_in_place(target: str, bundle_dir: Path | None) -> Callable[..., object]:
    """Loads `file.py:name` or `package.module:name`. Blocks while the module's imports run: call it in a thread.

    Args:
        target: Where the callable is; a file is relative to the bundle, or without one to the working directory.
        bundle_dir: The unpacked bundle, which goes first on the import path.

    Raises:
        AgentFailed: If it cannot be imported, is not there, or cannot be called.
    """
    location, _, name = target.partition(":")
    if not location or not name:
        raise AgentFailed(f"The Python target {target!r} is not of the form `file.py:name` or `package.module:name`.")
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
            raise AgentFailed(f"{location} cannot be imported.\n{describe_error(error)}") from None
    loaded: object = module
    for part in name.split("."):
        loaded = getattr(loaded, part, None)
    if not callable(loaded):
        raise AgentFailed(f"{location} has no callable {name!r}{_instead_of(module)}.")
    return loaded


def describe_error(error: BaseException) -> str:
    """Formats what an agent raised: from the first frame that is neither the runner's nor Python's own, with the names
    of a bundle's files as its author knows them.
    """
    summary = traceback.TracebackException.from_exception(error)
    seen: list[traceback.TracebackException] = [summary]
    for part in seen:
        frames = _frames_of_agent(part.stack)
        if part is not summary and all(frame.filename.startswith(_LIBRARIES) for frame in frames):
            # The depths of a library, before the part that has the agent in it.
            frames = frames[-1:]
        part.stack = traceback.StackSummary.from_list(frames)
        seen += [each for each in (part.__cause__, part.__context__, *(part.exceptions or ())) if each is not None]
    text = "".join(summary.format()).rstrip()
    for root in _bundle_roots:
        text = text.replace(f'"{root}{os.sep}', '"')
    return text


def _frames_of_agent(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    left = [frame for frame in frames if not frame.filename.startswith(_HERE)]
    while left and left[0].filename.startswith(_PYTHONS_OWN) and not left[0].filename.startswith(_INSTALLED):
        left.pop(0)
    return left


def _instead_of(module: ModuleType) -> str:
    """Says what else a module has that could be meant, empty if nothing."""
    own = [
        name
        for name, value in vars(module).items()
        if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    ]
    return f"; it has {', '.join(own[:_MAX_NAMES_SHOWN])}" if own else ""


def _enter_bundle(bundle_dir: Path) -> None:
    if str(bundle_dir) in sys.path and sys.path[0] == str(bundle_dir):
        return
    for name, module in list(sys.modules.items()):
        origin = getattr(module, "__file__", None)
        if origin and any(root != bundle_dir and Path(origin).is_relative_to(root) for root in _bundle_roots):
            del sys.modules[name]
    _bundle_roots.add(bundle_dir)
    sys.path[:] = [str(bundle_dir), *(path for path in sys.path if Path(path) not in _bundle_roots)]
    importlib.invalidate_caches()


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise AgentFailed(f"There is no file {path.name!r} where the agent should be.")
    name = f"fulmen_agent_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise AgentFailed(f"{path.name} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
