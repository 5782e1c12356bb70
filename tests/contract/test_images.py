"""What deploy/docker/slim.py takes out of an image's environment is missed by nothing."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.distributions import ROOT

SLIM = ROOT / "deploy/docker/slim.py"
LIMIT_S = 60


def package(name: str) -> Path:
    """Returns the folder of an installed package."""
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


@pytest.mark.skipif(sys.platform != "linux", reason="shared objects of Linux")
@pytest.mark.parametrize(
    ("name", "use"),
    [
        (
            "zstandard",
            "assert zstandard.decompress(zstandard.compress(b'abc')) == b'abc'; assert zstandard.backend == 'cext'",
        ),
        ("uvloop", "uvloop.new_event_loop().close()"),
        ("multidict", "assert multidict.MultiDict(a=1)['a'] == 1"),
    ],
)
def test_a_package_without_symbols_and_sources_works_as_before(tmp_path: Path, name: str, use: str) -> None:
    packages = tmp_path / "lib/python3/site-packages"
    shutil.copytree(package(name), packages / name)
    (packages / name / "unread.pyx").write_text("")
    before = sum(path.stat().st_size for path in packages.rglob("*.so"))

    subprocess.run([sys.executable, SLIM, tmp_path], check=True, timeout=LIMIT_S)

    left = list(packages.rglob("*.so"))
    assert left
    assert sum(path.stat().st_size for path in left) < before / 2
    assert not list(packages.rglob("*.py[xi]"))
    program = f"import sys; sys.path.insert(0, {str(packages)!r}); import {name}; assert {name}.__file__.startswith({str(packages)!r}); {use}"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S)


def test_generated_clients_lose_their_docstrings_and_nothing_else(tmp_path: Path) -> None:
    client = tmp_path / "lib/python3/site-packages/kubernetes_asyncio"
    client.mkdir(parents=True)
    (client / "__init__.py").write_text('"""A long story."""\n\nVALUE = 7\n')

    subprocess.run([sys.executable, SLIM, tmp_path], check=True, timeout=LIMIT_S)

    program = (
        f"import sys; sys.path.insert(0, {str(client.parent)!r}); import kubernetes_asyncio as one; "
        "assert (one.__doc__, one.VALUE) == (None, 7)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S)
    assert "A long story" in (client / "__init__.py").read_text()
