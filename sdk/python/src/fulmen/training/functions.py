"""Functions as agents and graders: packed by cloudpickle into files of the agent's bundle.

The bundle includes cloudpickle, so the runner needs only the same version of Python and the libraries that the functions
import. Why pickles and not source: docs/decisions/0029-functions-travel-as-pickles.md.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from fulmen.row_files import ExtraMissing
from fulmen.train_toml.train import ConfigError

__all__ = ["FILE", "packed_functions"]

FILE: Final = "fulmen_functions.py"
PICKLE: Final = "fulmen_functions.pickle"
VERSION: Final = sys.version_info[:2]
_LOADER: Final = '''"""Functions that were passed to Fulmen as objects. Made by fulmen, on Python {version} with cloudpickle {cloudpickle}."""

import pickle
import sys
from pathlib import Path

if sys.version_info[:2] != {version_info}:
    raise ImportError(
        "These functions were pickled on Python {version}, and this runner has "
        f"Python {{sys.version_info[0]}}.{{sys.version_info[1]}}. Give the agent as a path, such as agent.py:solve, "
        "or use a runner of the same version."
    )
globals().update(pickle.loads(Path(__file__).with_name({pickle!r}).read_bytes()))
'''


@contextmanager
def packed_functions(functions: Mapping[str, Callable[..., Any]], folder: Path | None) -> Iterator[dict[str, Path]]:
    """Yields the files that make functions known as `fulmen_functions.py:{name}`, by their name in the bundle.

    Args:
        functions: the functions by name.
        folder: the folder that is also in the bundle; the functions may import its modules.

    Raises:
        ExtraMissing: if cloudpickle is not installed.
        ConfigError: if a function cannot be pickled, or uses modules that the bundle will not have.
    """
    if not functions:
        yield {}
        return
    try:
        import cloudpickle
    except ImportError:
        raise ExtraMissing('Functions as agents need cloudpickle: pip install "fulmen[notebook]".') from None
    packed = _pickled(cloudpickle, functions)
    _require_modules(packed, functions, folder)
    with tempfile.TemporaryDirectory() as made:
        loader = _LOADER.format(
            version=f"{VERSION[0]}.{VERSION[1]}",
            version_info=tuple(VERSION),
            cloudpickle=cloudpickle.__version__,
            pickle=PICKLE,
        )
        files = {FILE: Path(made, FILE), PICKLE: Path(made, PICKLE)}
        files[FILE].write_text(loader, encoding="utf-8")
        files[PICKLE].write_bytes(packed)
        own = Path(cloudpickle.__file__).parent
        yield {**files, **{f"cloudpickle/{path.name}": path for path in sorted(own.glob("*.py"))}}


def _pickled(cloudpickle: ModuleType, functions: Mapping[str, Callable[..., Any]]) -> bytes:
    """Pickles functions by value, including functions of the user's own modules."""
    modules = {inspect.getmodule(each) for each in functions.values()}
    own = [each for each in modules if each is not None and each.__name__ != "__main__" and not _is_installed(each)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        packed: bytes = cloudpickle.dumps(dict(functions))
        return packed
    except Exception as error:  # Whatever the values that they use raise when they are pickled.
        names = ", ".join(sorted(functions))
        raise ConfigError(
            f"The functions {names} cannot be pickled: {type(error).__name__}: {error}. Create the objects that they use "
            "inside them, or give a path such as agent.py:solve.",
            (),
        ) from error
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)


def _require_modules(packed: bytes, functions: Mapping[str, Callable[..., Any]], folder: Path | None) -> None:
    """Raises ConfigError if the pickle names modules that are neither installed nor in the folder."""
    seen: set[str] = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            seen.add(module)
            return super().find_class(module, name)

    Reader(io.BytesIO(packed)).load()
    for function in functions.values():
        used = getattr(function, "__globals__", {})
        code = getattr(function, "__code__", None)
        seen |= {
            used[name].__name__ for name in getattr(code, "co_names", ()) if isinstance(used.get(name), ModuleType)
        }
    problems = []
    for name in sorted({each.partition(".")[0] for each in seen} - {"__main__"}):
        module = sys.modules.get(name)
        if module is None or _is_installed(module):
            continue
        file = Path(str(module.__file__)).resolve()
        if folder is None or not file.is_relative_to(folder.resolve()):
            root = file.parent.parent if file.name == "__init__.py" else file.parent
            problems.append(f'{name} of {file}: give folder="{root}"')
    if problems:
        raise ConfigError("The functions use modules that the runner does not have; nothing was created.", problems)


def _is_installed(module: ModuleType) -> bool:
    """Returns whether a module belongs to Python or an installed package, so that the runner can have it."""
    # Every runner gives agents its own SDK, also one that is not installed but on the path.
    if module.__name__.partition(".")[0] in {*sys.stdlib_module_names, "fulmen"}:
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        return True
    path = Path(file).resolve()
    places = {sysconfig.get_path(each) for each in ("purelib", "platlib")}
    return any(path.is_relative_to(Path(place).resolve()) for place in places) or "site-packages" in path.parts
