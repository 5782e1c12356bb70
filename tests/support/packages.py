"""What `make dist` makes, built once for all tests of a process, and environments that it is installed into."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.distributions import ROOT

__all__ = ["VERSION", "build", "install", "installed", "wheels"]

LIMIT_S = 400
VERSION = subprocess.run(
    [sys.executable, ROOT / "tools/version.py"], capture_output=True, text=True, check=True, timeout=LIMIT_S
).stdout.strip()
# As tools/setup.sh does, with a package index of the machine's own, and torch for the processor that it has.
INSTALL = """
set -euo pipefail
. tools/distributions.sh
PATH=$PWD/.venv/bin:$PATH
folder=$1
shift
make_environment "$folder"
[ -z "$TORCH" ] || install_torch "$folder"
"$uv" pip install --quiet --python "$folder/bin/python" --constraint constraints.txt "$@"
"""


def build(folder: Path, *parts: str, **environment: str) -> Path:
    """Builds parts of what is published into a folder; returns it."""
    command = [sys.executable, str(ROOT / "tools/dist.py"), *parts, "--output", str(folder)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


@functools.cache
def wheels() -> Mapping[str, Path]:
    """Returns the wheels of this checkout by their distributions, as `fulmen_cli`."""
    holder = tempfile.TemporaryDirectory(prefix="fulmen-wheels-")
    folder = build(Path(holder.name), "python")
    found = Wheels({path.name.partition("-")[0]: path for path in folder.glob("*.whl")})
    found.holder = holder
    return found


class Wheels(dict[str, Path]):
    """Wheels, which are removed with the last reference."""

    holder: tempfile.TemporaryDirectory[str]


def install(folder: Path, requirements: Sequence[str], *, with_torch: bool) -> Path:
    """Installs files and whatever they depend on into an environment of their own; returns its folder of programs."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", "-c", INSTALL, "bash", folder, *requirements],
        cwd=ROOT,
        env={**environment, "TORCH": "yes" if with_torch else "", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def installed(programs: Path) -> dict[str, str]:
    """Returns the versions of all distributions of an environment by their names."""
    listing = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    done = subprocess.run(
        [programs / "python", "-I", "-c", listing], capture_output=True, text=True, check=True, timeout=60
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found
