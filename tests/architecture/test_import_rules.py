"""Runs import-linter with the contracts of the root's pyproject.toml, and shows that they can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
LIMIT_S = 110


def test_the_import_contracts_are_kept(repository_root: Path) -> None:
    linted = subprocess.run(
        [LINT_IMPORTS, "--no-logo", "--no-cache"],
        cwd=repository_root,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert linted.returncode == 0, linted.stdout + linted.stderr
