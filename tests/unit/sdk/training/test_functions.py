"""Functions become files of a bundle, which a runner without cloudpickle can load."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fulmen.row_files import ExtraMissing
from fulmen.train_toml.train import ConfigError
from fulmen.training import functions
from fulmen.training.functions import FILE, packed_functions

LIMIT_S = 60
NOTEBOOK = """
import collections

offset = 40
limits = collections.Counter(most=2)

def helper(value):
    return value + offset

async def solve(task):
    return helper(task["number"]) + limits["most"]
"""


@pytest.fixture
def solve() -> Callable[..., Any]:
    """Returns a function as a cell of a notebook defines it: in `__main__`, with what other cells defined."""
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(NOTEBOOK, cell)  # as a kernel runs a cell
    found: Callable[..., Any] = cell["solve"]
    return found


def unpacked(files: dict[str, Path], folder: Path) -> None:
    for name, path in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(path.read_bytes())


def run_there(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code beside a bundle in an interpreter without installed packages."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"
    return subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=LIMIT_S)


def test_a_function_of_a_notebook_runs_elsewhere_with_what_it_uses(solve: Callable[..., Any], tmp_path: Path) -> None:
    with packed_functions({"agent": solve}, None) as files:
        unpacked(files, tmp_path)

    ran = run_there(tmp_path, "import asyncio, fulmen_functions as f; print(asyncio.run(f.agent({'number': 0})))")

    assert ran.stdout == "42\n", ran.stderr


def test_another_version_of_python_is_refused_by_a_sentence(
    solve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "VERSION", (3, 99))
    with packed_functions({"agent": solve}, None) as files:
        unpacked(files, tmp_path)

    ran = run_there(tmp_path, "import fulmen_functions")

    assert "pickled on Python 3.99, and this runner has Python 3." in ran.stderr


def test_what_cannot_be_pickled_is_named_before_anything_is_sent() -> None:
    lock = threading.Lock()

    def solve(task: Any) -> bool:
        return lock.locked()

    with pytest.raises(ConfigError, match=r"agent cannot be pickled: .*lock"), packed_functions({"agent": solve}, None):
        pass


def test_modules_that_the_runner_does_not_have_are_named_with_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_helpers.py").write_text("def double(value):\n    return 2 * value\n")
    monkeypatch.syspath_prepend(tmp_path)
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec("import my_helpers\nfrom my_helpers import double\ndef solve(task):\n    return double(1)\n", cell)

    with (
        pytest.raises(ConfigError) as raised,
        packed_functions({"agent": cell["solve"]}, None),
    ):
        pass
    with packed_functions({"agent": cell["solve"]}, tmp_path) as files:
        assert FILE in files

    assert raised.value.problems == (f'my_helpers of {tmp_path / "my_helpers.py"}: give folder="{tmp_path}"',)


def test_without_cloudpickle_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)

    with pytest.raises(ExtraMissing, match=r"fulmen\[notebook\]"), packed_functions({"agent": len}, None):
        pass


def test_without_functions_nothing_is_added() -> None:
    with packed_functions({}, None) as files:
        assert files == {}
