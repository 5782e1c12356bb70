"""What a traced command takes of the SDK is there, and loads where no SDK is installed."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

import pytest

import fulmen
from fulmen_runner.agents.tracing import command


def taken() -> list[tuple[str, str]]:
    """Returns the module and the attribute of each `_sdk_module("...").attribute` in the source."""
    return [
        (node.value.args[0].value, node.attr)
        for node in ast.walk(ast.parse(inspect.getsource(command)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == command._sdk_module.__name__
        and isinstance(node.value.args[0], ast.Constant)
    ]


def test_every_use_is_seen_here() -> None:
    assert inspect.getsource(command).count("_sdk_module(") == len(taken()) + 1, "and the definition"


@pytest.mark.parametrize(("module", "attribute"), taken())
@pytest.mark.parametrize("installed", [True, False])
def test_a_module_of_the_sdk_has_what_a_traced_command_takes(
    monkeypatch: pytest.MonkeyPatch, module: str, attribute: str, *, installed: bool
) -> None:
    monkeypatch.setenv(command.SDK_VARIABLE, str(Path(fulmen.__file__).parent))
    if not installed:
        for name in {module, *(name for name in sys.modules if name.partition(".")[0] == "fulmen")}:
            monkeypatch.setitem(sys.modules, name, None)
    loaded = command._sdk_module(module)
    assert hasattr(loaded, attribute)
    assert (loaded.__name__ == module) == installed
