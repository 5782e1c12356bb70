"""What is generated of the Python API is what its tools make, and type checkers know the whole of it."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 110


@pytest.mark.parametrize(
    "tool",
    [
        "tools/sync_client.py",
        "tools/algorithm_classes.py",
        "tools/train_toml_reference.py",
        "tools/proxy_toml_reference.py",
    ],
)
def test_generated_files_are_what_their_tool_makes(
    repository_root: Path, tool: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In this process, which has imported most of what they import: that takes longer than what they do.
    monkeypatch.setattr(sys, "argv", [tool, "--check"])
    monkeypatch.syspath_prepend(repository_root / "tools")
    monkeypatch.chdir(repository_root)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(tool, run_name="__main__")

    assert ended.value.code == 0, capsys.readouterr().err


def test_a_type_checker_knows_what_everything_is_and_what_is_wrong(repository_root: Path, tmp_path: Path) -> None:
    program = repository_root / "tests/contract/data/python_api/typed_program.py"
    options = ["--strict", "--warn-unused-ignores", "--follow-imports=silent", "--cache-dir", tmp_path]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *options, program],
        cwd=repository_root,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )

    assert checked.returncode == 0, checked.stdout
