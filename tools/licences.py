"""Lists the licences of all installed dependencies in docs/licences.md, and checks them: `make licences`.

pip-licenses reads them from the metadata of the environment. Exit status 1 means that a licence is not in `ALLOWED`, or with
--check that the page is not current.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final

PIP_LICENSES: Final = "pip-licenses==5.5.5"
ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs/licences.md"
LIMIT_S: Final = 300

ALLOWED: Final = frozenset({
    "0BSD", "Apache", "Apache-2.0", "Apache 2.0", "Apache 2.0 License", "Apache Software License",
    "Apache-2.0 WITH LLVM-exception", "BSD License", "BSD-2-Clause", "BSD-3-Clause", "3-Clause BSD License", "BSL-1.0",
    "CC0-1.0", "CNRI-Python", "DFSG approved", "ISC License (ISCL)", "MIT", "MIT License", "MIT-0", "MIT-CMU", "MPL-2.0",
    "Mozilla Public License 2.0 (MPL 2.0)", "PSF-2.0", "Python Software Foundation License", "Zlib",
})  # fmt: skip
"""Licences that permit use with software under Apache 2.0: permissive ones, and MPL 2.0, which covers its own files only."""

HEAD: Final = """# Licences of dependencies

Every Python distribution in the environment of `make setup`: the services, the command line and the development tools. `make
licences` writes this page and fails for a licence that is not allowed (`tools/licences.py`). CUDA libraries, which come with
some builds of torch, and vLLM, which is installed separately, have their own terms.

| distribution | licence |
|---|---|
"""


def installed() -> list[tuple[str, str]]:
    """Returns name and licence of each installed distribution that is not Fulmen's own."""
    command = [
        shutil.which("uv") or str(Path(sys.executable).with_name("uv")),
        "tool",
        "run",
        "--system-certs",
        PIP_LICENSES,
        "--python",
        sys.executable,
    ]
    command += ["--from=mixed", "--format=json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    found = [(each["Name"], each["License"]) for each in json.loads(done.stdout)]
    # uv is in the environment only if it was not on PATH.
    theirs = (one for one in found if one[0] != "uv" and not one[0].startswith("fulmen"))
    return sorted(theirs, key=lambda one: one[0].lower())


def refused(licences: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each distribution whose licence is not allowed; of alternatives one must be."""
    return [
        f"licences: {name}: {licence or 'no licence'} is not allowed"
        for name, licence in licences
        if not _is_allowed(licence)
    ]


def _is_allowed(licence: str) -> bool:
    """Evaluates an expression of SPDX, in which AND binds tighter than OR; `; ` separates classifiers, which all apply."""
    licence = licence.strip()
    if licence in ALLOWED:
        return True
    for separator, combined in (("; ", all), (" OR ", any), (" AND ", all)):
        parts = _split(licence, separator)
        if len(parts) > 1:
            return combined(_is_allowed(part) for part in parts)
    return licence.startswith("(") and licence.endswith(")") and _is_allowed(licence[1:-1])


def _split(text: str, separator: str) -> list[str]:
    """Splits a text at separators outside of parentheses."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth and text.startswith(separator, index):
            parts.append(text[start:index])
            start = index + len(separator)
    return [*parts, text[start:]]


def main() -> int:
    """Writes or checks the page; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not current, and write nothing")
    arguments = parser.parse_args()
    licences = installed()
    problems = refused(licences)
    page = HEAD + "".join(f"| {name} | {licence} |\n" for name, licence in licences)
    if not arguments.check:
        PAGE.write_text(page)
    elif PAGE.read_text() != page:
        problems.append("licences: docs/licences.md is not current: run `make licences`")
    print("\n".join(problems) or f"licences: {len(licences)} distributions, all allowed")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
