"""Prints the version of all that is published, or writes another one everywhere.

python tools/version.py             prints it, as sdk/python/pyproject.toml names it
python tools/version.py 0.2.0       writes it into every file that names it
python tools/version.py --check     exits with 1 if a file names another one, or if the tag that follows does: --check v0.1.0
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST = "sdk/python/pyproject.toml"
# By file, what stands before the version. What is released together depends on itself in one version.
PLACES = {
    FIRST: r'^version = "|"fulmen[\w-]*(?:\[[\w,]+\])?==',
    "cli/pyproject.toml": r'^version = "|"fulmen[\w-]*(?:\[[\w,]+\])?==',
    "libs/*/pyproject.toml": r'^version = "|"fulmen[\w-]*(?:\[[\w,]+\])?==',
    "services/*/pyproject.toml": r'^version = "|"fulmen[\w-]*(?:\[[\w,]+\])?==',
    "deploy/helm/fulmen/Chart.yaml": r"^(?:version|appVersion): ",
    "clients/node/package.json": r'^  "version": "',
    "package-lock.json": r'"@fulmen/client",\n\s+"version": "',
    "CITATION.cff": r"^version: ",
}
VERSION = r"\d[\w.+-]*"


def found() -> Iterator[tuple[Path, re.Pattern[str], list[str]]]:
    """Yields every file with the pattern of its versions and the versions that it names."""
    for pattern, before in PLACES.items():
        for path in sorted(ROOT.glob(pattern)):
            place = re.compile(f"({before})({VERSION})", re.M)
            yield path, place, [match[2] for match in place.finditer(path.read_text(encoding="utf-8"))]


def main() -> int:
    """Runs the command of the arguments; returns the exit status."""
    files = list(found())
    [version] = {each for path, _, versions in files if path == ROOT / FIRST for each in versions[:1]}
    match sys.argv[1:]:
        case []:
            print(version)
        case ["--check", *tags]:
            wrong = [
                f"{path.relative_to(ROOT)} names {', '.join(v) or 'none'}" for path, _, v in files if {*v} != {version}
            ]
            wrong += [f"the tag is {tag}" for tag in tags if tag != f"v{version}"]
            print("\n".join(f"version: it is {version}, but {each}" for each in wrong), end="\n" if wrong else "")
            return int(bool(wrong))
        case [new] if re.fullmatch(VERSION, new):
            for path, place, _ in files:
                path.write_text(place.sub(rf"\g<1>{new}", path.read_text(encoding="utf-8")), encoding="utf-8")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
