"""The HTTP server of a service, and its ASGI helpers.

Importing it imports uvicorn without its command line, whose supervisors of processes bring multiprocessing: 1.5 MB per
process that no service uses. Whoever asks uvicorn for it still gets it.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_COMMAND_LINE = "uvicorn.main"
_FROM_THERE = ("Server", "main", "run")


def _import_uvicorn() -> None:
    stand_in = ModuleType(_COMMAND_LINE)
    vars(stand_in).update(dict.fromkeys(_FROM_THERE))
    sys.modules[_COMMAND_LINE] = stand_in
    try:
        names = vars(import_module("uvicorn"))
    finally:
        del sys.modules[_COMMAND_LINE]
    for name in _FROM_THERE:
        del names[name]
    names["__getattr__"] = _of_command_line


def _of_command_line(name: str) -> Any:
    """Returns a name of uvicorn's command line, and gives the package all of them, as it usually has them."""
    if name not in _FROM_THERE:
        raise AttributeError(f"module 'uvicorn' has no attribute {name!r}")
    command_line = import_module(_COMMAND_LINE)
    vars(sys.modules["uvicorn"]).update({each: getattr(command_line, each) for each in _FROM_THERE})
    return getattr(command_line, name)


if "uvicorn" not in sys.modules:
    _import_uvicorn()
