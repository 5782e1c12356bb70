"""A change that breaks the contracts is seen, and the committed stubs import on older libraries."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LIMIT_S = 110
# The oldest and a middle version that agents still pin; the newest is what everything else here runs on.
OLD_TOOLCHAINS = (("protobuf==5.29.5", "grpcio==1.71.2"), ("protobuf==6.33.0", "grpcio==1.76.0"))
IMPORT_EVERY_STUB = """
import importlib, pathlib, sys
root = pathlib.Path(sys.argv[1])
names = sorted(str(p.relative_to(root).with_suffix("")).replace("/", ".") for p in root.glob("fulmen/*/v1/*_pb2*.py"))
for name in names:
    importlib.import_module(name)
print(len(names))
"""


def run(root: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in the root of the checkout."""
    return subprocess.run(
        command,
        cwd=root,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def uv() -> str:
    """Returns the installer that made this environment."""
    return shutil.which("uv") or str(Path(sys.executable).with_name("uv"))


@pytest.fixture(scope="module")
def buf(repository_root: Path) -> str:
    """Returns buf; a missing one is a failure, not a skip."""
    program = repository_root / "node_modules/.bin/buf"
    assert program.exists(), "run `make test`, which installs buf"
    return str(program)


def test_a_changed_field_number_is_seen_as_breaking(buf: str, repository_root: Path, tmp_path: Path) -> None:
    changed = tmp_path / "protos"
    shutil.copytree(repository_root / "protos", changed)
    proto = changed / "fulmen/store/v1/rollout.proto"
    text = proto.read_text(encoding="utf-8")
    proto.write_text(text.replace("string training_run = 3;", "string training_run = 99;"), encoding="utf-8")

    compared = run(repository_root, buf, "breaking", str(changed), "--against", "protos")

    assert compared.returncode != 0
    assert 'field "3" with name "training_run"' in compared.stdout


@pytest.mark.parametrize(("protobuf", "grpcio"), OLD_TOOLCHAINS)
def test_the_stubs_import_on_older_libraries(protobuf: str, grpcio: str, repository_root: Path) -> None:
    stubs = str(repository_root / "sdk/python/src")
    needed = ("--with", protobuf, "--with", grpcio, "--with", "googleapis-common-protos")
    imported = run(
        repository_root,
        *(uv(), "run", "--quiet", "--no-project", "--isolated", "--python", sys.executable, *needed),
        *("python", "-c", IMPORT_EVERY_STUB, stubs),
        PYTHONPATH=stubs,
    )

    assert imported.returncode == 0, imported.stderr
    assert int(imported.stdout) == len(list(Path(stubs).glob("fulmen/*/v1/*_pb2*.py")))
