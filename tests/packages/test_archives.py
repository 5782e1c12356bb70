"""What `make dist` makes is complete, of one version, the same bytes each time, and works where it is unpacked."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.clients import built
from tests.support.deploy.helm_chart import PYTHON as HELM
from tests.support.deploy.helm_chart import helm
from tests.support.distributions import DISTRIBUTIONS, ROOT
from tests.support.packages import VERSION, build, wheels

LIMIT_S = 100
DATA = Path(__file__).parent / "data"
long = pytest.mark.long


def test_every_file_that_names_a_version_names_the_same() -> None:
    checked = version("--check", f"v{VERSION}")

    assert (checked.returncode, checked.stdout) == (0, "")


def test_a_tag_of_another_version_is_refused() -> None:
    checked = version("--check", "v9.9.9")

    assert (checked.returncode, checked.stdout) == (1, f"version: it is {VERSION}, but the tag is v9.9.9\n")


def version(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the program behind a release's check."""
    command = [sys.executable, ROOT / "tools/version.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@long
def test_the_same_commit_makes_the_same_bytes(tmp_path: Path) -> None:
    first, second = (build(tmp_path / name, "python", "chart", "npm") for name in ("first", "second"))

    sums = (first / "SHA256SUMS").read_text()
    assert sums == (second / "SHA256SUMS").read_text()
    assert len(sums.splitlines()) == 2 * len(DISTRIBUTIONS) + 2
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=first, check=True, timeout=LIMIT_S)


@long
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: d.import_root)
def test_a_wheel_has_its_licence_its_types_and_nothing_but_its_package(distribution) -> None:  # type: ignore[no-untyped-def]
    wheel = wheels()[distribution.project["name"].replace("-", "_")]
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [metadata] = [email.message_from_bytes(archive.read(n)) for n in names if n.endswith(".dist-info/METADATA")]

    assert f"{distribution.import_root}/py.typed" in names
    assert any(re.search(r"\.dist-info/licenses/LICENSE$", name) for name in names)
    assert {name.partition("/")[0] for name in names} == {
        distribution.import_root,
        f"{distribution.import_root if distribution.import_root != 'fulmen' else 'fulmen'}-{VERSION}.dist-info",
    }
    assert metadata["Version"] == VERSION
    assert metadata["Description-Content-Type"] == "text/markdown"
    own = [each for each in metadata.get_all("Requires-Dist", []) if each.startswith("fulmen")]
    assert all(f"=={VERSION}" in each for each in own), own


@long
def test_a_package_index_takes_every_wheel() -> None:
    # PyPI refuses wheels for "linux": they do not say which C library they need.
    assert [path.name for path in wheels().values() if re.search(r"-linux_\w+\.whl$", path.name)] == []


@long
def test_the_packed_chart_renders_as_its_folder_does(tmp_path: Path) -> None:
    folder = helm("template", {})
    packed = build(tmp_path, "chart") / f"fulmen-{VERSION}.tgz"
    command = [HELM, ROOT / "tools/helm_chart.py", "template", packed]

    rendered = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)

    assert rendered.stdout == folder.stdout
    assert "kind: Deployment" in rendered.stdout


@long
def test_a_typescript_program_uses_the_npm_package(tmp_path: Path) -> None:
    built("node")
    packed = build(tmp_path / "dist", "npm", REPOSITORY="https://example.com/fulmen") / f"fulmen-client-{VERSION}.tgz"
    modules = tmp_path / "node_modules"
    with tarfile.open(packed) as archive:
        archive.extractall(modules / "@fulmen", filter="data")
    (modules / "@fulmen/package").rename(modules / "@fulmen/client")
    # What it depends on; Node looks for their own dependencies where they really are.
    for scope in ("@grpc", "@bufbuild"):
        (modules / scope).symlink_to(ROOT / "node_modules" / scope)
    (modules / "@types").symlink_to(ROOT / "clients/node/node_modules/@types")
    for name in ("program.ts", "tsconfig.json"):
        shutil.copy(DATA / "npm" / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')

    compiled = subprocess.run(
        [ROOT / "node_modules/.bin/tsc"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert (compiled.returncode, compiled.stdout) == (0, "")
    ran = subprocess.run(["node", "program.js"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)

    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "14 UNAVAILABLE true\n"
    package = json.loads((modules / "@fulmen/client/package.json").read_text())
    assert (package["version"], package["repository"]["url"]) == (VERSION, "git+https://example.com/fulmen.git")


@long
def test_the_go_module_is_laid_out_for_a_proxy_and_compiles(tmp_path: Path) -> None:
    built("go")
    packed = build(tmp_path / "dist", "go") / f"fulmen-go-{VERSION}.zip"
    prefix = f"fulmen.dev/client@v{VERSION}/"
    with zipfile.ZipFile(packed) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    assert all(name.startswith(prefix) for name in names)
    assert {"go.mod", "LICENSE", "main.go"} <= {name.removeprefix(prefix) for name in names}
    assert (tmp_path / prefix / "go.mod").read_text().startswith("module fulmen.dev/client\n")

    # Without modules and a network: the module where GOPATH has it, its dependencies from the machine.
    source = tmp_path / "gopath/src/fulmen.dev/client"
    source.parent.mkdir(parents=True)
    (tmp_path / prefix).rename(source)
    environment = {**os.environ, "GO111MODULE": "off", "GOPATH": f"{tmp_path}/gopath:/usr/share/gocode"}
    compiled = subprocess.run(
        ["go", "build", "-o", tmp_path / "client", "."],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    ran = subprocess.run([tmp_path / "client"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert "no command" in ran.stderr
