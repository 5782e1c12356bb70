"""Reports files and functions over the size limits; exits with 1 if a file is over its limit.

Files that the tools make are left out, since nobody writes them.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

LONGEST_FILE = 450
LONGEST_FUNCTION = 70
MADE = "Made by tools/"
"""Is in the first line of a file that is made."""
SUFFIXES = frozenset({".py", ".sh", ".sql", ".js", ".mjs", ".ts", ".go", ".java", ".cc", ".h", ".proto"})


def long_functions(path: Path, text: str) -> list[str]:
    """Returns the functions of a Python file that are over the limit."""
    return [
        f"{path}:{node.lineno}: {node.name} has {length} lines (at most {LONGEST_FUNCTION})"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > LONGEST_FUNCTION
    ]


def main() -> int:
    """Prints the report; returns the exit status."""
    listed = subprocess.run(["git", "ls-files"], check=True, capture_output=True, text=True).stdout.split("\n")
    files = [Path(name) for name in listed if Path(name).suffix in SUFFIXES and "_pb2" not in name]
    too_long, advice = [], []
    for path in files:
        if not path.exists():
            continue
        text = path.read_text(encoding="utf-8")
        if MADE in text.partition("\n")[0]:
            continue
        if (lines := text.count("\n")) > LONGEST_FILE:
            too_long.append(f"{path}: {lines} lines (at most {LONGEST_FILE})")
        if path.suffix == ".py":
            advice += long_functions(path, text)
    print("\n".join(too_long + advice), end="\n" if too_long or advice else "")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
