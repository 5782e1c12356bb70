"""docs/cli.md says what the commands' help says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_reference_is_current_and_holds_every_command(repository_root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "tools/cli_reference.py", "--check"],
        cwd=repository_root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    page = (repository_root / "docs/cli.md").read_text(encoding="utf-8")
    assert all(f"# fulmen {command}\n" in page for command in ("up", "agent check", "run compare", "token issue"))
